# Counts its own heap, and then allocates nothing until it gets a line: a heap that somebody else can count, too.
require_relative "support"

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

Report.run do |extra|
  # Whoever waits for the line allocates when it comes, not before.
  queue = Queue.new
  reader = Thread.new { queue << $stdin.gets }
  Thread.pass until reader.status == "sleep"
  GC.start
  GC.disable
  counts = {}
  # The first round fills the caches of its calls, which are objects; it has to wait, too.
  main = Thread.current
  first = Thread.new do
    Thread.pass until main.status == "sleep"
    queue << nil
  end
  2.times do |round|
    if round == 1
      first.join
      $stdout.puts "counting"
      $stdout.flush
    end
    ObjectSpace.count_objects(counts)
    queue.pop
  end
  extra["counts"] = counts
  extra["orders"] = ObjectSpace.each_object(Order).count { |o| o.instance_of?(Order) }
  extra["large"] = ObjectSpace.each_object(LargeOrder).count
end
