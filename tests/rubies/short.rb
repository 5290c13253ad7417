# A script that lives about 0.3 s: some collections, then gone.
started = Process.clock_gettime(Process::CLOCK_MONOTONIC)
require_relative "support"

Report.run do |extra|
  rounds = 0
  while Process.clock_gettime(Process::CLOCK_MONOTONIC) - started < 0.25
    Work.small(4_000)
    GC.start if (rounds % 8).zero?
    rounds += 1
  end
  extra["rounds"] = rounds
end
