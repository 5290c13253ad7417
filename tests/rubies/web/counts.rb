# Appends a line "EVENT PID PPID GC.count" to the file in GCTRACE_TEST_COUNTS. One write, so lines do not mix. In between the
# witness, if one is given, logs what it sees to GCTRACE_TEST_LOG.PID.
module Counts
  FILE = File.open(ENV.fetch("GCTRACE_TEST_COUNTS"), File::WRONLY | File::APPEND | File::CREAT)
  require ENV["GCTRACE_TEST_WITNESS"] if ENV.key?("GCTRACE_TEST_WITNESS")

  def self.begin
    say("begin")
    Witness.start if defined?(Witness)
  end

  def self.end
    # However few requests a worker served, it has collected.
    GC.start
    count = GC.count
    if defined?(Witness)
      Witness.stop
      Witness.dump("#{ENV.fetch("GCTRACE_TEST_LOG")}.#{Process.pid}")
    end
    say("end", count)
  end

  def self.say(event, count = GC.count)
    FILE.syswrite("#{event} #{Process.pid} #{Process.ppid} #{count}\n")
  end
end
