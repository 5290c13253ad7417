# Allocates, and writes the values of its own counter: over a time without collections, with quiet before and after it, and then
# over some collections.
require_relative "support"

Report.run do |extra|
  kept = nil
  quiet = Float(ARGV.fetch(0, "0"))
  # The value read here is an Integer, which needs no slot.
  total = -> { GC.stat(:total_allocated_objects) }
  GC.start
  GC.disable
  sleep quiet
  from = Time.now.to_f
  before = total.call
  400.times { kept = Array.new(1000) { "x" * 20 } }
  extra["growth"] = total.call - before
  extra["from"] = from
  extra["to"] = Time.now.to_f
  sleep quiet
  GC.enable
  count = GC.count
  100.times { kept = Array.new(1000) { "x" * 200 } }
  extra["allocated"] = total.call
  extra["collections"] = GC.count - count
  extra["kept"] = kept.size
end
