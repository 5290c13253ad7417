# Counts its own heap, and then allocates nothing until it gets a line: another program can count the same heap. Arguments: `compact`, with
# `forget` for another collection after that; `ractors`, which have allocated and wait; `stress`, to collect at each of some allocations.
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

def stressed
  GC.stress = ARGV.include?("stress")
  yield
ensure
  GC.stress = false
end

ORDERS = Array.new(4_950) { |i| Order.new(i) }
stressed { 50.times { |i| ORDERS << Order.new(4_950 + i) } }
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

if ARGV.include?("ractors")
  RACTORS = Array.new(2) do
    Ractor.new(Ractor.current) do |main|
      kept = Array.new(3_000) { |i| ["kept by a Ractor", i] }
      # The first round fills the caches of these calls: the second one allocates nothing when it waits.
      2.times do
        main.send(:ready)
        Ractor.receive
      end
      kept.size
    end
  end
  RACTORS.each { Ractor.receive }
  RACTORS.each { |ractor| ractor.send(:again) }
  RACTORS.each { Ractor.receive }
end

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
  # While there are Ractors, `each_object` finds only what may be shared between them.
  kept = ->(all, of) { ARGV.include?("ractors") ? all : ObjectSpace.each_object(of) }
  extra["orders"] = kept.call(ORDERS, Order).count { |o| o.instance_of?(Order) }
  extra["large"] = kept.call(LARGE, LargeOrder).count
end
