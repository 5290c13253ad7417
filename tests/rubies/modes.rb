# Explicit collections in all combinations of full_mark, immediate_mark and immediate_sweep; GC off and on again;
# collections that GC.start requests while another one is not finished; one that C code requests.
require_relative "support"

Report.run do |extra|
  kept = []
  [true, false].product([true, false], [true, false]) do |full, mark, sweep|
    Work.keep(kept, 8_000)
    GC.start(full_mark: full, immediate_mark: mark, immediate_sweep: sweep)
    Work.small(2_000)
    GC.start(full_mark: full, immediate_mark: mark, immediate_sweep: sweep)
  end
  GC.disable
  Work.small(150_000)
  GC.start
  GC.enable
  Work.small(150_000)
  ObjectSpace.garbage_collect
  Work.small(2_000)
  Witness.collect if defined?(Witness)
  extra["off_and_on"] = true
end
