# A program whose threads do one thing each that `gctrace dump` shows: two hold a lock each and want the other's, one reads, one is called
# back by an extension, two sleep, one of them with a hostile name. Its report has their `Thread#backtrace`, and when some of them went to
# sleep. Arguments: methods that more threads run all the time (computing, printing, collecting), and how many more sleep.
require_relative "support"
require "json"
require "zlib"

def deadlock(mine, other, ready)
  mine.synchronize do
    ready << 1
    sleep 0.01 until ready.size >= 2
    other.synchronize { nil }
  end
end

# By a thread that is about to sleep.
def note(times)
  times[Thread.current] = Process.clock_gettime(Process::CLOCK_MONOTONIC_RAW, :nanosecond)
end

def reading(input, times)
  note(times)
  input.read
end

def computing
  n = 0
  n += 1 while true
end

def printing
  big = 7**500_000
  big.to_s while true
end

def collecting
  GC.start while true
end

def napping(times)
  note(times)
  sleep
end

class Sink
  def write(*_texts)
    sleep
  end
end

# The extension calls `write`: its frames are between those of Ruby.
def zipping
  writer = Zlib::GzipWriter.new(Sink.new)
  writer.write("x")
  writer.finish
end

Report.run do |extra|
  a, b, ready = Mutex.new, Mutex.new, Queue.new
  reader, _writer = IO.pipe
  named = {}
  times = {}
  start = lambda do |name, &body|
    thread = Thread.new(&body)
    thread.name = name
    named[name] = thread
  end
  start.call("locks a") { deadlock(a, b, ready) }
  start.call("locks b") { deadlock(b, a, ready) }
  start.call("reads") { reading(reader, times) }
  start.call("naps") { napping(times) }
  start.call("zips") { zipping }
  start.call("evil\e[2J\nname") { napping(times) }
  (ARGV[1] || 0).to_i.times { |at| start.call("many #{at}") { napping(times) } }
  sleep 0.01 until named.values.all?(&:stop?) && ready.size == 2
  # Until the last one is in its place.
  sleep 0.2
  extra["backtraces"] = named.transform_values(&:backtrace)
  busy = (ARGV[0] || "").split(",").map { |kind| Thread.new { send(kind) } }
  puts "dumped"
  $stdout.flush
  $stdin.gets
  (busy + named.values).each(&:kill)
  extra["slept"] = named.transform_values { |thread| times[thread] }.compact
  extra["done"] = true
end
