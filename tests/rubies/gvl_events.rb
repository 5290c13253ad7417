# Threads that request, acquire and release the GVL in every way, between two readings of the witness.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_GVL_WITNESS")

def spin(ms)
  till = GvlWitness.now + ms * 1_000_000
  nil while GvlWitness.now < till
end

Report.run do |extra|
  queue = Queue.new
  answers = Queue.new
  lock = Mutex.new
  reader, writer = IO.pipe
  stolen = Host.stolen_ns
  GvlWitness.start
  threads = [
    *Array.new(2) { Thread.new { spin(500) } },
    Thread.new { 15.times { sleep 0.01; spin(1) } },
    Thread.new { 20.times { answers << queue.pop } },
    Thread.new { 10.times { lock.synchronize { sleep 0.005 } } },
    Thread.new { 10.times { lock.synchronize { spin(2) } } },
    Thread.new { 10.times { reader.readpartial(1) } }
  ]
  20.times { queue << 1; answers.pop }
  10.times { writer.write("x"); Thread.pass }
  threads.each(&:join)
  # Beside nothing else: many short waits.
  handovers = defined?(HANDOVERS) ? HANDOVERS : 0
  other = Thread.new { handovers.times { answers << queue.pop } }
  handovers.times do |n|
    queue << 1
    answers.pop
    # A reader that gets no CPU for a quarter of a second still loses none.
    sleep 0.02 if n % 100 == 99
  end
  other.join
  GvlWitness.stop
  extra["gvl"] = GvlWitness.events
  extra["stolen_ns"] = Host.stolen_ns - stolen
end
