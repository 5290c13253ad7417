# Logs what each request allocates, as the VM counts it: "NAME NATIVE_TID BEGIN_NS BEGIN_OBJECTS BEGIN_COUNT END_NS END_OBJECTS END_COUNT"
# to the file in GCTRACE_TEST_TRUTH.
TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)
state = lambda do
  [Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond), GC.stat(:total_allocated_objects), GC.count].join(" ")
end

run lambda { |env|
  begun = state.call
  name = env["PATH_INFO"].split("/").last
  20_000.times { |i| i.to_s }
  tid = File.readlink("/proc/thread-self")[/\d+\z/]
  TRUTH.syswrite("#{name} #{tid} #{begun} #{state.call}\n")
  [200, { "content-type" => "text/plain" }, ["OK"]]
}
