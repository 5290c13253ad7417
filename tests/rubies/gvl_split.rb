# One thread that computes, one that compresses (C code without the GVL), one that sleeps; each reports how much CPU time the
# kernel charged it and how long it had to wait for a CPU.
require_relative "support"
require "zlib"

def charged
  run, delay = File.read("/proc/thread-self/schedstat").split.map(&:to_i)
  { "cpu_ns" => run, "delay_ns" => delay }
rescue SystemCallError
  { "cpu_ns" => Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID, :nanosecond), "delay_ns" => nil }
end

def spend(name, seconds)
  Thread.new do
    Thread.current.name = name
    till = Process.clock_gettime(Process::CLOCK_MONOTONIC) + seconds
    yield while Process.clock_gettime(Process::CLOCK_MONOTONIC) < till
    charged
  end
end

Report.run do |extra|
  # Binary digits take long to compress. What cannot be compressed is soon done, and its copies are made, and collected, with the GVL.
  text = Random.new(1).bytes(1 << 17).unpack1("B*")
  threads = {
    "computes" => spend("computes", 1.5) { 1_000.times { |i| i * i } },
    "presses" => spend("presses", 1.5) { Zlib::Deflate.deflate(text, 9) },
    "sleeps" => spend("sleeps", 1.5) { sleep 0.02 }
  }
  extra["threads"] = threads.transform_values(&:value)
end
