# GC.compact and automatic compaction, where this Ruby has them.
require_relative "support"

Report.run do |extra|
  kept = []
  Work.keep(kept, 40_000)
  kept = kept.each_slice(4).map(&:first)
  kept.each { |node| node.other = nil }
  compacts = GC.respond_to?(:compact) # from 2.7 on
  2.times do
    Work.small(20_000)
    GC.compact if compacts
  end
  begin
    GC.auto_compact = true
    extra["auto_compact"] = true
    3.times do
      Work.keep(kept, 20_000)
      GC.start
    end
  rescue NotImplementedError, NoMethodError
    extra["auto_compact"] = false
  ensure
    GC.auto_compact = false if extra["auto_compact"]
  end
  Work.small(50_000)
  extra["compacted"] = compacts ? GC.stat(:compact_count) : 0
end
