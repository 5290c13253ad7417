# Requests that compute in Ruby, then without the GVL, then sleep. Logs "NAME RUBY_CPU_NS NATIVE_CPU_NS SLEPT_NS" of each to the file in
# GCTRACE_TEST_TRUTH; the first two are CPU times of the thread.
require "zlib"

TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)
# Binary digits take long to compress. What cannot be compressed is soon done, and its copies are made with the GVL.
DIGITS = Random.new(1).bytes(1 << 12).unpack1("B*")
GC.disable

def took(clock)
  begin_ns = Process.clock_gettime(clock, :nanosecond)
  yield
  Process.clock_gettime(clock, :nanosecond) - begin_ns
end

run lambda { |env|
  name = env["PATH_INFO"].split("/").last
  ruby = took(Process::CLOCK_THREAD_CPUTIME_ID) do
    n = 0
    n += 1 while n < 2_000_000
  end
  # Zlib releases the GVL while it works (`rb_nogvl`, ext/zlib/zlib.c).
  native = took(Process::CLOCK_THREAD_CPUTIME_ID) { Zlib::Deflate.deflate(DIGITS, 9) }
  slept = took(Process::CLOCK_MONOTONIC) { sleep 0.05 }
  TRUTH.syswrite("#{name} #{ruby} #{native} #{slept}\n")
  [200, { "content-type" => "text/plain" }, ["OK"]]
}
