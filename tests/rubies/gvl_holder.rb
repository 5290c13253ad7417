# One thread holds the GVL in C code that never releases it; two others sleep until that took much longer often enough. They
# report each time: begin, end, and for how long of it they had no CPU although they could run.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_GVL_WITNESS")

Report.run do |extra|
  stop, ready = false, Queue.new
  stolen = Host.stolen_ns
  hog = Thread.new do
    Thread.current.name = "hog"
    delay = GvlWitness.run_delay.tap { ready << true }
    until stop
      GvlWitness.hold(150)
      sleep 0.002
    end
    { "tid" => GvlWitness.tid, "delay_ns" => GvlWitness.run_delay - delay }
  end.tap { ready.pop } # Nobody waits for the GVL before the hog holds it in C.
  sleepers = 2.times.map do |number|
    Thread.new do
      Thread.current.name = "sleeper#{number}"
      # Until here it waited for its first CPU, and for the GVL.
      born = [0, GvlWitness.now, GvlWitness.run_delay]
      slept = []
      late = 0
      while late < Integer(ENV.fetch("GCTRACE_TEST_SLEEPS", "8"))
        delay = GvlWitness.run_delay
        begun = GvlWitness.now
        sleep 0.01
        ended = GvlWitness.now
        slept << [begun, ended, GvlWitness.run_delay - delay]
        late += 1 if ended - begun - slept.last[2] > 40_000_000
      end
      { "tid" => GvlWitness.tid, "born" => born, "slept" => slept }
    end
  end
  extra["sleepers"] = sleepers.map(&:value)
  extra["stolen_ns"] = Host.stolen_ns - stolen
  stop = true
  extra["hog"] = hog.value
end
