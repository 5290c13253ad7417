# Appends a line "EVENT PID PPID GC.count" to the file in GCTRACE_TEST_COUNTS. One write, so lines do not mix.
module Counts
  FILE = File.open(ENV.fetch("GCTRACE_TEST_COUNTS"), File::WRONLY | File::APPEND | File::CREAT)

  def self.say(event)
    FILE.syswrite("#{event} #{Process.pid} #{Process.ppid} #{GC.count}\n")
  end
end
