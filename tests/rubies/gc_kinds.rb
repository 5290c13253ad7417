# Collects garbage for a second each by two methods: one whose collections are all minor, and one whose are all major. Neither allocates, so
# that no other cycle begins in them. Its report has the numbers of collections.
require_relative "support"

def milliseconds
  Process.clock_gettime(Process::CLOCK_MONOTONIC, :millisecond)
end

def minor_ones(till)
  GC.start(full_mark: false) while milliseconds < till
end

def major_ones(till)
  GC.start(full_mark: true) while milliseconds < till
end

def counts
  [GC.stat(:minor_gc_count), GC.stat(:major_gc_count)]
end

Report.run do |extra|
  old = Array.new(100_000) { |at| "an old string #{at}" }
  4.times { GC.start }
  # No cycle is open when the methods begin.
  GC.disable
  first = counts
  minor_ones(milliseconds + 1500)
  between = counts
  major_ones(milliseconds + 1500)
  last = counts
  GC.enable
  extra["by_minor"] = [between[0] - first[0], between[1] - first[1]]
  extra["by_major"] = [last[0] - between[0], last[1] - between[1]]
  extra["old"] = old.size
end
