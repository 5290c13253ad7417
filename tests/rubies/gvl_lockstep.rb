# Threads of which one uses the CPU at any time: while all of them run, the GVL is always held. Each reports how long it lived.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_GVL_WITNESS")

Report.run do |extra|
  gate = Queue.new
  lives = 4.times.map do |number|
    Thread.new do
      Thread.current.name = "runner#{number}"
      gate.pop
      begun = GvlWitness.now
      till = begun + 1_500_000_000
      nil while GvlWitness.now < till
      { "tid" => GvlWitness.tid, "begin_ns" => begun, "end_ns" => GvlWitness.now }
    end
  end
  sleep 0.1
  4.times { gate << 1 }
  extra["lives"] = lives.map(&:value)
end
