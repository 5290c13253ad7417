# Is in the middle of a cycle, with sweeping left to do, when it says that it is ready.
require_relative "support"

Work.small(20) until GC.latest_gc_info(:state) == :sweeping
Report.run do |extra|
  extra["state"] = GC.latest_gc_info(:state)
  Work.small(150_000)
end
