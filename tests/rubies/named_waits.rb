# Threads that each wait for one kind of thing, again and again, for about two seconds, while two others compute: after each wait they wait
# for the GVL.
require_relative "support"
require "monitor"

TICK = 0.04

def now
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

# Starts a thread that does this until the end.
def again(name, till)
  Thread.new do
    Thread.current.name = name
    yield while now < till
  end
end

Report.run do |extra|
  till = now + 2.0
  mutex, monitor, condition, guard = Mutex.new, Monitor.new, ConditionVariable.new, Mutex.new
  queue = Queue.new
  reader, writer = IO.pipe
  sleepy = -> { sleep TICK }
  threads = {
    "spins" => -> { 1_000.times { |i| i * i } },
    "spins, too" => -> { 1_000.times { |i| i * i } },
    "holds" => lambda do
      mutex.synchronize { monitor.synchronize(&sleepy) }
      sleep TICK
    end,
    "feeds" => lambda do
      sleep TICK
      queue << 1
      writer.write("x")
      guard.synchronize { condition.signal }
    end,
    "sleeps" => sleepy,
    "mutex" => -> { mutex.synchronize { nil } },
    "monitor" => -> { monitor.synchronize { nil } },
    "condition" => -> { guard.synchronize { condition.wait(guard, 1) } },
    "queue" => -> { queue.pop },
    "io" => -> { reader.readpartial(1) },
    "process" => -> { Process.wait(fork { sleep TICK and exit!(true) }) },
    "thread" => lambda do
      inner = Thread.new do
        Thread.current.name = "inner"
        sleep TICK
      end
      inner.join
    end
  }
  threads = threads.to_h { |name, work| [name, again(name, till, &work)] }
  threads.each do |name, thread|
    # What they wait for comes no more.
    queue << 1
    writer.write("x")
    guard.synchronize { condition.signal }
    thread.join
  end
  extra["threads"] = threads.keys
end
