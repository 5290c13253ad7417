# Threads that hand over the GVL as often as they can, for some seconds.
require_relative "support"

Report.run do |extra|
  till = Process.clock_gettime(Process::CLOCK_MONOTONIC) + Float(ENV.fetch("GCTRACE_TEST_SECONDS", "5"))
  counts = 4.times.map do
    Thread.new do
      n = 0
      until Process.clock_gettime(Process::CLOCK_MONOTONIC) > till
        100.times { Thread.pass }
        n += 100
      end
      n
    end
  end
  extra["passes"] = counts.sum(&:value)
end
