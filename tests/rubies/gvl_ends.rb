# Threads that end in the middle of waiting for the GVL, in blocking calls, by exceptions, and in children.
require_relative "support"
require "timeout"

def spin(seconds)
  till = Process.clock_gettime(Process::CLOCK_MONOTONIC) + seconds
  nil while Process.clock_gettime(Process::CLOCK_MONOTONIC) < till
end

Report.run do |extra|
  sum = 0
  4.times do
    hog = Thread.new { spin(0.15) }
    waiting = Array.new(3) { Thread.new { spin(5) } }
    sleeping = Array.new(3) { Thread.new { sleep } }
    popping = Array.new(3) { Thread.new { Queue.new.pop } }
    sleep 0.02
    (waiting + sleeping + popping).each(&:kill).each(&:join)
    hog.join
    raised = Thread.new do
      Thread.current.report_on_exception = false
      begin
        Timeout.timeout(0.02) { IO.pipe[0].read }
      rescue Timeout::Error
        raise IOError, "as planned"
      end
    end
    begin
      raised.join
    rescue IOError
      sum += 1
    end
    child = fork do
      Array.new(2) { Thread.new { spin(0.05) } }.each(&:join)
      exit!(3)
    end
    sum += Process.wait2(child)[1].exitstatus
  end
  # 4 exceptions and 4 children that end with 3.
  extra["sum"] = sum
end
