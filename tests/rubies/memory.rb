# Memory of each kind that comes and goes between collections; the witness records it at each.
require_relative "support"

Witness.watch_memory if defined?(Witness)
rounds = Integer(ARGV[0] || 40)
Report.run do |extra|
  kept = []
  rounds.times do |i|
    Work.keep(kept, 4_000)
    Work.large(6, 3 << 20)
    buffer = "y" * ((i % 5) << 20)
    kept.clear if i % 8 == 7
    GC.start if i % 4 == 3
    buffer.clear
  end
  extra["kept"] = kept.size
end
