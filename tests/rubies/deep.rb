# A recursion of the given depth whose innermost call uses CPU time for a while.
require_relative "support"

DEPTH = Integer(ARGV.fetch(0))

def spin(till)
  nil while Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) < till
end

def descend(left)
  return spin(Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) + 0.6) if left.zero?
  descend(left - 1)
end

Report.run do |_extra|
  descend(DEPTH - 1)
end
