# One thread holds the GVL in C code that never releases it; two others sleep, and report how much longer that took.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_GVL_WITNESS")

Report.run do |extra|
  stop = false
  hog = Thread.new do
    Thread.current.name = "hog"
    tid = GvlWitness.tid
    until stop
      GvlWitness.hold(150)
      sleep 0.002
    end
    tid
  end
  sleepers = 2.times.map do |number|
    Thread.new do
      Thread.current.name = "sleeper#{number}"
      slept = Integer(ENV.fetch("GCTRACE_TEST_SLEEPS", "8")).times.map do
        begun = GvlWitness.now
        sleep 0.01
        [begun, GvlWitness.now]
      end
      { "tid" => GvlWitness.tid, "slept" => slept }
    end
  end
  extra["sleepers"] = sleepers.map(&:value)
  stop = true
  extra["hog"] = hog.value
end
