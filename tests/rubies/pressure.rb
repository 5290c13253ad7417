# Minor collections by newobj and by malloc; major ones by missing free slots, by old objects, by objects without
# write barriers and by old malloc; marking in steps. Two explicit collections only.
require_relative "support"
require "strscan"

scale = Integer(ARGV[0] || 1)
Report.run do |extra|
  scale.times do
    kept = []
    buffers = []
    Work.small(200_000)
    Work.large(120)
    12.times do
      Work.keep(kept, 25_000)
      Work.small(10_000)
      buffers << "y" * 400_000
    end
    # Old objects alone: many free slots, few old objects, then batches that survive long enough to become old.
    kept = []
    2.times { GC.start } # if a major one was due anyway, the first has its reason and not :force
    old = []
    16.times do
      Work.keep(old, 10_000)
      4.times { Work.small(150_000) }
    end
    # Many of one kind without a write barrier: remembered by every minor collection.
    scanners = Array.new(4_000) { StringScanner.new("z") }
    6.times { Work.small(120_000) }
    # From 3.3 on only old objects that lose theirs count (gc.c, rb_gc_writebarrier_unprotect). Only C code can do that.
    lists = Array.new(20_000) { [nil] }
    6.times { Work.small(120_000) }
    lists.each { |list| Witness.unprotect(list) } if defined?(Witness)
    6.times { Work.small(120_000) }
    8.times { Work.large(20, 2 << 20); buffers << "y" * 4_000_000 }
    extra["kept"] = old.size + scanners.size + lists.size + buffers.size
  end
end
