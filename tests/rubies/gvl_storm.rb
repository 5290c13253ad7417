# Threads that hand over the GVL as often as they can, for some seconds, or with the argument "told" until they are told to stop: by a
# line, or by the end of the standard input.
require_relative "support"

Report.run do |extra|
  told = ARGV[0] == "told"
  stop = false
  till = Process.clock_gettime(Process::CLOCK_MONOTONIC) + Float(ENV.fetch("GCTRACE_TEST_SECONDS", "5"))
  counts = 4.times.map do
    Thread.new do
      n = 0
      until told ? stop : Process.clock_gettime(Process::CLOCK_MONOTONIC) > till
        100.times { Thread.pass }
        n += 100
      end
      n
    end
  end
  if told
    $stdin.gets
    stop = true
  end
  extra["passes"] = counts.sum(&:value)
end
