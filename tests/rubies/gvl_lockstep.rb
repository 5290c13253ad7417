# Threads of which one uses the CPU at any time: while several of them run, the GVL is always held. Each reports how long it
# lived, and each time for which it could not read the clock: begin, end, and for how much of it the thread had no CPU
# although it could run.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_GVL_WITNESS")

Report.run do |extra|
  gate = Queue.new
  stolen = Host.stolen_ns
  lives = 4.times.map do |number|
    Thread.new do
      Thread.current.name = "runner#{number}"
      gate.pop
      gaps = []
      delay = GvlWitness.run_delay
      last = begun = GvlWitness.now
      till = begun + 1_500_000_000
      while last < till
        now = GvlWitness.now
        if now - last > 1_000_000
          before, delay = delay, GvlWitness.run_delay
          gaps << [last, now, delay - before]
        end
        last = now
      end
      { "tid" => GvlWitness.tid, "begin_ns" => begun, "end_ns" => last, "gaps" => gaps }
    end
  end
  sleep 0.1
  4.times { gate << 1 }
  extra["lives"] = lives.map(&:value)
  extra["stolen_ns"] = Host.stolen_ns - stolen
end
