# Process.warmup (from 3.3 on): a full collection, compaction, and objects made old at once.
require_relative "support"

Report.run do |extra|
  kept = []
  Work.keep(kept, 10_000)
  Work.small(20_000)
  extra["warmed_up"] = Process.respond_to?(:warmup)
  2.times do
    Process.warmup if extra["warmed_up"]
    Work.small(60_000)
    Work.keep(kept, 2_000)
  end
end
