# A program that hangs: one thread holds a lock and waits for input that does not come, three wait for the lock, and the main
# thread waits for them all, each in its own method. It continues when it is given a line.
require_relative "support"

def held(input)
  IO.select([input])
end

def locking_a(mutex)
  mutex.synchronize { nil }
end

def locking_b(mutex)
  [1].each { mutex.synchronize { nil } }
end

def locking_c(mutex)
  mutex.lock
  mutex.unlock
end

def joining(threads)
  threads.each(&:join)
end

Report.run do |extra|
  mutex = Mutex.new
  taken = Queue.new
  holder = Thread.new do
    mutex.synchronize do
      taken << 1
      held($stdin)
    end
  end
  taken.pop
  waiters = %i[locking_a locking_b locking_c].map { |name| Thread.new { send(name, mutex) } }
  sleep 0.01 until waiters.all?(&:stop?)
  puts "hung"
  $stdout.flush
  joining([holder, *waiters])
  extra["done"] = true
end
