# Collections by hand only. Logs each request and each collection as the thread itself sees it, to the file in GCTRACE_TEST_TRUTH:
# "request NAME NATIVE_TID BEGIN_NS END_NS" and "gc NATIVE_TID BEGIN_NS END_NS".
TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)
now = -> { Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond) }
tid = -> { File.readlink("/proc/thread-self")[/\d+\z/].to_i }
GC.start
GC.disable

run lambda { |env|
  native = tid.call
  begin_ns = now.call
  kind, name = env["PATH_INFO"].split("/").last(2)
  case kind
  when "gc"
    3.times do
      at = now.call
      GC.start
      TRUTH.syswrite("gc #{native} #{at} #{now.call}\n")
      sleep 0.002
    end
  when "wait" then sleep 0.03
  end
  TRUTH.syswrite("request #{name} #{native} #{begin_ns} #{now.call}\n")
  [200, { "content-type" => "text/plain" }, ["OK"]]
}
