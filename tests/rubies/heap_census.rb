# Counts its own heap, and then allocates nothing until it gets a line: another program can count the same heap.
require_relative "support"
require "objspace"

class Order
  def initialize(id)
    @id = id
    @name = "order #{id}"
  end
end

class LargeOrder < Order; end
module Shipped; end

ORDERS = Array.new(5_000) { |i| Order.new(i) }
LARGE = Array.new(300) { |i| LargeOrder.new(i) }
# Objects with a class of their own or with a module in it are of the class that they were made from.
ORDERS[0].define_singleton_method(:single) { true }
ORDERS[1].extend(Shipped)
NAMELESS = Array.new(70) { Class.new(Order) }.map { |c| c.new(0) }
# Half of what is in these pages is garbage: pages that are partly free.
KEPT = Array.new(40_000) { |i| "kept #{i}" }.select.with_index { |_, i| i.even? }

# Memory of strings and arrays outside of their slots: nothing, something, shared, two bytes after the end.
class OwnString < String; end
class OwnArray < Array; end
STRINGS = (0..40).map { |i| OwnString.new("x" * (i * 50)) }
STRINGS << OwnString.new("wide" * 50).encode("UTF-16LE") << STRINGS[20].dup << STRINGS[30][3..]
ARRAYS = (0..40).map { |i| OwnArray.new(i * 3, i) }
ARRAYS << ARRAYS[30].dup

Report.run do |extra|
  # The thread that waits for the line allocates when it comes, not before.
  queue = Queue.new
  reader = Thread.new { queue << $stdin.gets }
  Thread.pass until reader.status == "sleep"
  GC.start
  # A compacting collection finds out what cannot be moved; the next major one forgets it.
  GC.compact if ARGV.include?("compact")
  # Wait until nothing is left to sweep: dead objects do not count as old.
  GC.start unless ARGV.include?("compact") && !ARGV.include?("forget")
  GC.disable
  counts = {}
  # The first round fills the caches of its calls, which are objects; it has to wait, too.
  main = Thread.current
  first = Thread.new do
    Thread.pass until main.status == "sleep"
    queue << nil
  end
  old = strings = arrays = nil
  2.times do |round|
    if round == 1
      first.join
      $stdout.puts "counting"
      $stdout.flush
    end
    old = GC.stat(:old_objects)
    strings = ObjectSpace.memsize_of_all(OwnString)
    arrays = ObjectSpace.memsize_of_all(OwnArray)
    ObjectSpace.count_objects(counts)
    queue.pop
  end
  extra["counts"] = counts
  extra["old"] = old
  extra["strings"] = strings
  extra["arrays"] = arrays
  extra["compacted"] = GC.stat[:compact_count]
  extra["orders"] = ObjectSpace.each_object(Order).count { |o| o.instance_of?(Order) }
  extra["large"] = ObjectSpace.each_object(LargeOrder).count
end
