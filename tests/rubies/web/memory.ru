# Changes its memory as the path asks for, and logs what the thread and the process had before and after that, to the file in GCTRACE_TEST_TRUTH:
# "NAME NATIVE_TID BEGIN_MINOR BEGIN_MAJOR BEGIN_RSS_KB END_MINOR END_MAJOR END_RSS_KB": page faults of the thread, and the pages that the
# process has mapped.
TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)
# Larger than the largest threshold up to which glibc keeps freed memory (`DEFAULT_MMAP_THRESHOLD_MAX`, 32 MiB).
BYTES = 40 << 20
# A collection would free memory at some time, in some thread.
GC.disable
kept = []

faults = lambda do
  # Fields 10 and 12 (proc(5)); the name before may contain spaces.
  File.read("/proc/thread-self/stat")[/\) (.*)/m, 1].split.values_at(7, 9).join(" ")
end
rss = -> { File.read("/proc/self/smaps_rollup")[/^Rss:\s+(\d+) kB/, 1] }

run lambda { |env|
  resident = rss.call
  # After the last reading of something else, and before the first: what lies between are the faults of the work.
  before = faults.call
  kind, name = env["PATH_INFO"].split("/").last(2)
  case kind
  when "touch" then kept << ("x" * BYTES)
  when "free" then kept.each(&:clear).clear
  when "other" then Thread.new { kept << ("x" * BYTES) }.join
  end
  after = faults.call
  tid = File.readlink("/proc/thread-self")[/\d+\z/]
  TRUTH.syswrite("#{name} #{tid} #{before} #{resident} #{after} #{rss.call}\n")
  [200, { "content-type" => "text/plain" }, ["OK"]]
}
