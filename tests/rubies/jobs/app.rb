# Jobs that log their own truth: a line "JID CLASS NATIVE_TID BEGIN_NS END_NS GC_COUNT_BEFORE GC_COUNT_AFTER TRACEPARENT" for each run, to the
# file in GCTRACE_TEST_TRUTH; the last is the job's member, or "-". Sidekiq runs GCTRACE_TEST_THREADS jobs at a time.
require "sidekiq"

[:configure_server, :configure_client].each do |side|
  Sidekiq.public_send(side) { |config| config.redis = { url: ENV.fetch("GCTRACE_TEST_REDIS") } }
end

# What the job says of its trace.
class Traces
  def call(_instance, job, _queue)
    Thread.current[:traceparent] = job["traceparent"]
    yield
  end
end

Sidekiq.configure_server { |config| config.server_middleware { |chain| chain.add Traces } }

TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)
# A line for each LongJob that has begun. They end when there is the other file.
BEGUN = File.open(ENV.fetch("GCTRACE_TEST_TRUTH") + ".begun", File::WRONLY | File::APPEND | File::CREAT)
RELEASED = ENV.fetch("GCTRACE_TEST_TRUTH") + ".released"
THREADS = Integer(ENV.fetch("GCTRACE_TEST_THREADS"))

module Logs
  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
  end

  def perform(*args)
    tid = Thread.current.native_thread_id
    begin_ns, count = now, GC.count
    work(*args)
  ensure
    TRUTH.syswrite("#{jid} #{self.class} #{tid} #{begin_ns} #{now} #{count} #{GC.count} #{Thread.current[:traceparent] || "-"}\n")
  end
end

# Collects by allocation.
class HardJob
  include Sidekiq::Worker
  include Logs

  def work(*)
    60_000.times { "x" * 60 }
  end
end

module Shop
  # Waits without the GVL, and uses Redis in the middle.
  class WaitJob
    include Sidekiq::Worker
    include Logs

    def work(*)
      sleep 0.01
      begin
        TCPSocket.new("127.0.0.1", 1).close
      rescue SystemCallError
        # Nobody listens there; it is not Redis.
      end
      Sidekiq.redis { |redis| redis.get("nothing") }
      # As a lock does it. It is no queue of Sidekiq.
      Sidekiq.redis do |redis|
        redis.lpush("gctrace:lock", "free")
        redis.brpop("gctrace:lock", 1)
      end
      5_000.times { "x" * 60 }
    end
  end

  # Waits until each thread runs one: as many are pushed at a time as there are threads. It is last in the queue that is asked last, so all
  # jobs before it have ended then.
  class MarkerJob
    include Sidekiq::Worker
    include Logs
    LOCK = Mutex.new
    @came = 0

    class << self
      attr_reader :came

      def come
        LOCK.synchronize { @came += 1 }
      end
    end

    def work(*)
      number = self.class.come
      all = (number + THREADS - 1) / THREADS * THREADS
      sleep 0.005 while self.class.came < all
    end
  end
end

# Its thread dies.
class BadJob
  include Sidekiq::Worker
  include Logs

  def work(*)
    20_000.times { "x" * 60 }
    raise "SECRETERROR"
  end
end

# Redis goes away while it runs.
class LongJob
  include Sidekiq::Worker
  include Logs

  def work(*)
    BEGUN.syswrite("#{jid}\n")
    sleep 0.01 until File.exist?(RELEASED)
  end
end
