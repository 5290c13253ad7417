# One thread collects garbage, which takes a while; two others request only the GVL, all the time.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_GVL_WITNESS")

Report.run do |extra|
  keep = Array.new(400_000) { |i| "an object that is marked and not swept #{i}" }
  stop = false
  spinners = 2.times.map do |number|
    Thread.new do
      Thread.current.name = "spinner#{number}"
      GvlWitness.now until stop
    end
  end
  sleep 0.3
  extra["begin_ns"] = GvlWitness.now
  8.times { GC.start }
  extra["end_ns"] = GvlWitness.now
  sleep 0.3
  stop = true
  spinners.each(&:join)
  extra["kept"] = keep.size
end
