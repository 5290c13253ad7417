# Requests that compute in Ruby alone, and wait for the GVL meanwhile. Logs "NAME NATIVE_TID BEGIN_NS END_NS CPU_NS" of each to the
# file in GCTRACE_TEST_TRUTH; CPU_NS is the CPU time of the thread.
TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)
now = ->(clock = Process::CLOCK_MONOTONIC) { Process.clock_gettime(clock, :nanosecond) }
GC.disable

run lambda { |env|
  cpu = now.call(Process::CLOCK_THREAD_CPUTIME_ID)
  begin_ns = now.call
  name = env["PATH_INFO"].split("/").last
  n = 0
  n += 1 while n < 700_000
  end_ns = now.call
  cpu = now.call(Process::CLOCK_THREAD_CPUTIME_ID) - cpu
  tid = File.readlink("/proc/thread-self")[/\d+\z/].to_i
  TRUTH.syswrite("#{name} #{tid} #{begin_ns} #{end_ns} #{cpu}\n")
  [200, { "content-type" => "text/plain" }, ["OK"]]
}
