# Traces its allocations, or does not, dumps its own heap as ObjectSpace does, and then allocates nothing until it gets a line.
require_relative "support"
require "objspace"
require "json"

class Order
  def initialize(id)
    @id = id
    @tags = ["tag #{id}", { id => "of #{id}" }]
  end

  def self.build(id)
    new(id)
  end
end

# Its objects come into slots that are free when nothing is traced any more.
class Late; end

Pair = Struct.new(:one, :two)
module Shipped; end

def orders(count)
  Array.new(count) { |i| i.odd? ? Order.new(i) : Order.build(i) }
end

def trace(times)
  times.times { ObjectSpace.trace_object_allocations_start }
end

mode, path = ARGV
BEFORE = orders(300)
KEPT = []

# What is here for a while, so that its slots are free later.
def work(count)
  KEPT << orders(count) << Array.new(count) { |i| Pair.new("one #{i}", i) }
  orders(count * 3)
  KEPT.last[0].singleton_class
  KEPT.last[1].extend(Shipped)
  KEPT << Array.new(50) { Class.new(Order) } << Array.new(20) { |i| "sym #{mode_name} #{i}".to_sym }
  KEPT << proc { count } << binding << 2**100 << [1.5, 3r, /re#{count}/] << (0..40).to_h { |i| ["k#{i}", [i]] }
  define_singleton_method("dynamic #{count}") { "of a dynamic method" + count.to_s }
  KEPT << send("dynamic #{count}")
  KEPT << ("a".."z").map(&:upcase).each_slice(3).to_a << JSON.parse('{"parsed": [{"by": "C code"}]}')
  nil
end

def mode_name
  ARGV[0]
end

case mode
when "never"
  work(1000)
when "started"
  trace(1)
  work(1000)
when "debug"
  ObjectSpace.trace_object_allocations_debug_start
  work(1000)
  GC.start
  work(500)
when "nested"
  trace(2)
  work(1000)
  ObjectSpace.trace_object_allocations_stop
  work(500)
when "block"
  ObjectSpace.trace_object_allocations { work(1000) }
when "cleared"
  trace(1)
  work(1000)
  ObjectSpace.trace_object_allocations_clear
  work(500)
when "stopped"
  trace(1)
  work(1000)
  ObjectSpace.trace_object_allocations_stop
when "compacted"
  trace(1)
  work(1000)
  GC.compact
when "evil"
  trace(1)
  KEPT << eval("Array.new(7) { Order.new(1) }", binding, "evil\e[2J\u202e.rb", 7)
when "busy"
  trace(1)
  work(1000)
  $stdout.puts "dumped"
  $stdout.flush
  # Without any rest a fast machine changes all of the table before it is read.
  Thread.new { loop { 40.times { orders(50) }; sleep 0.005 } }
  $stdin.gets
  exit!
end
# Those that survive grow old, at different times.
2.times { GC.start }
work(100)
GC.start(full_mark: false)
LATE = mode == "stopped" || mode == "block" ? Array.new(3000) { Late.new } : []

Report.run do |extra|
  queue = Queue.new
  Thread.new { queue << $stdin.gets }.then { |reader| Thread.pass until reader.status == "sleep" }
  GC.start unless mode == "evil"
  GC.disable
  ready = "dumped\n"
  places = {}
  unless mode == "evil"
    # The methods of ObjectSpace themselves, of some: an address, and what they say.
    (KEPT[0] + KEPT[1] + BEFORE + LATE).each do |object|
      address = ObjectSpace.dump(object)[/"address":"(0x\h+)"/, 1]
      places[address] = [
        ObjectSpace.allocation_sourcefile(object),
        ObjectSpace.allocation_sourceline(object),
        ObjectSpace.allocation_method_id(object)&.to_s,
        ObjectSpace.allocation_generation(object),
      ]
    end
    File.open(path, "w") do |file|
      ObjectSpace.dump_all(output: file)
    end
  end
  $stdout.write(ready)
  $stdout.flush
  queue.pop
  extra["places"] = places
end
