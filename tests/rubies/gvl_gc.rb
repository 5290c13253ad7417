# One thread collects garbage, which takes a while; two others request only the GVL, all the time. They report for how long they
# had no CPU although they could run. It goes on until the collections themselves, and not the waits for the GVL between them, have
# taken 200 ms by Ruby's own account.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_GVL_WITNESS")

Report.run do |extra|
  keep = Array.new(400_000) { |i| "an object that is marked and not swept #{i}" }
  stop = false
  spinners = 2.times.map do |number|
    Thread.new do
      Thread.current.name = "spinner#{number}"
      delay = GvlWitness.run_delay
      GvlWitness.now until stop
      GvlWitness.run_delay - delay
    end
  end
  stolen = Host.stolen_ns
  sleep 0.3
  extra["begin_ns"] = GvlWitness.now
  GC::Profiler.enable
  GC.start until GC::Profiler.total_time >= 0.2
  extra["end_ns"] = GvlWitness.now
  sleep 0.3
  stop = true
  extra["delay_ns"] = spinners.sum(&:value)
  extra["stolen_ns"] = Host.stolen_ns - stolen
  extra["kept"] = keep.size
  # The VM visits all objects at its end, in a pause that belongs to no cycle (`rb_objspace_call_finalizer`): for these it took up to 18 ms.
  keep.clear
  GC.start
end
