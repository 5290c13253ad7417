# Dumps its own heap as ObjectSpace does, and then allocates nothing until it gets a line.
require_relative "support"
require "objspace"

class Order
  def initialize(id)
    @id = id
    @tags = ["a#{id}", "b"]
  end
end

# More variables than there is room for in the slot.
class Grown
  def initialize(id)
    40.times { |i| instance_variable_set("@v#{i}", "grown #{id} #{i}") }
    remove_instance_variable(:@v7)
  end
end

# So many orders of variables that Ruby keeps them in a table, from 3.2 on.
class Varied
  def initialize(id)
    instance_variable_set("@first#{id}", "first #{id}")
    @second = ["second #{id}"]
  end
end

# Objects without variables, which in some releases are different from those with variables.
class Bare; end

Pair = Struct.new(:one, :two)
Wide = Struct.new(:a, :b, :c, :d, :e)
KEPT = [
  Array.new(300) { |i| Order.new(i) },
  Array.new(50) { Bare.new },
  Array.new(30) { |i| Grown.new(i) },
  Array.new(30) { |i| Varied.new(i) },
  Array.new(100) { |i| { "k#{i}" => "v#{i}", i => [i] } },
  Array.new(20) { |i| (0..40).to_h { |k| ["key #{i} #{k}", "value #{k}"] } },
  Array.new(50) { |i| Pair.new("one #{i}", [i]) },
  Array.new(50) { |i| Wide.new("a#{i}", "b", "c", "d", "e#{i}") },
  Array.new(10) { |i| Hash.new { |hash, key| hash[key] = "#{key} #{i}" } },
  (0..20).map { |i| ("long " * 40 + i.to_s)[10..] },
  [1, 2.5, 3r, Complex(1, 2), 2**80, /x#{KEPT_NAME = "y"}/, "match".match(/a(t)/)],
  (0..30).map { |i| "sym #{i}".to_sym },
  (0..200).to_a.map(&:to_s)[5..100],
]
# An entry that was deleted, and a hash that compares by identity.
SMALL = { "a" => "b", "c" => "d", "e" => "f" }
SMALL.delete("c")
LARGE = (0..50).to_h { |i| ["large #{i}", "of #{i}"] }
20.times { |i| LARGE.delete("large #{i * 2}") }
IDENTITY = {}.compare_by_identity
IDENTITY["same"] = "other"

# A global variable with two names, and one that a block traces.
$kept = ["of a global variable"]
alias $also $kept
$traced = +"traced"
trace_var(:$traced) { |value| value }

path = ARGV.fetch(0)
Report.run do
  queue = Queue.new
  Thread.new { queue << $stdin.gets }.then { |reader| Thread.pass until reader.status == "sleep" }
  GC.start
  GC.disable
  ready = "dumped\n"
  File.open(path, "w") do |file|
    ObjectSpace.dump_all(output: file)
  end
  $stdout.write(ready)
  $stdout.flush
  queue.pop
end
