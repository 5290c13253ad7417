# Is in the middle of a cycle, with sweeping left to do, when it prints that it is ready.
require_relative "support"

# Alternating live objects and garbage, so that every page has some free slots and one step of sweeping never suffices. (A
# small heap whose free slots are all in its last two pages is swept in one step: 3.4 has such a one at boot.)
kept = []
300_000.times do |i|
  kept << [i]
  [i, i]
end
Work.small(20) until GC.latest_gc_info(:state) == :sweeping
Report.run do |extra|
  extra["state"] = GC.latest_gc_info(:state)
  Work.small(600_000)
  extra["kept"] = kept.size
end
