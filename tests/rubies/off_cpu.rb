# Threads that sleep, wait for a queue and wait for input, each in a method of its own, and measure how long it took.
require_relative "support"

def now
  Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
end

def sleeping
  sleep 0.25
end

def waiting(queue)
  queue.pop
end

def reading(input)
  input.read(1)
end

def timed(took, name)
  before = now
  yield
  took[name] = took.fetch(name, 0) + now - before
end

Report.run do |extra|
  # Times that began before gctrace saw the process are not seen.
  sleep 0.5
  took = {}
  queue = Queue.new
  input, output = IO.pipe
  threads = [
    Thread.new { timed(took, "waiting") { waiting(queue) } },
    Thread.new { timed(took, "reading") { reading(input) } },
  ]
  4.times { timed(took, "sleeping") { sleeping } }
  queue << 1
  output.write("x")
  threads.each(&:join)
  extra["took"] = took
end
