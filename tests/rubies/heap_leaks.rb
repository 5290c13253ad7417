# Works until "end", with a major collection in each round, and keeps something of each round or nothing. What is kept in different ways
# has different classes.
require_relative "support"

class Order; end
class Item; end
class Scrap; end
class Seat; end
class Entry; end
CACHE = []
CLOSURES = []
module Shop
  class Names
    BY_ID = {}
    private_constant :BY_ID

    def self.keep(name)
      BY_ID[name] = true
    end
  end
end
RING = Array.new(2_000)
FULL = {}

def closure(number)
  -> { number + 1 }
end

def counter
  seen = []
  -> { seen << Item.new }
end

COUNTER = counter

ROUNDS = {
  # All grow: what an array of a constant has, and procs, what the variables of a closure have, and strings in a hash of a private one.
  "all" => lambda do |n|
    300.times do |i|
      CACHE << Order.new
      CLOSURES << closure(i)
      COUNTER.call
      Shop::Names.keep("a name that is too long to be embedded #{n} #{i}" * 2)
    end
  end,
  # All are stable: only garbage, a ring whose elements are replaced, a cache that is full from the start.
  "stable" => lambda do |n|
    2_000.times { Scrap.new }
    300.times { |i| RING[(n * 300 + i) % RING.size] = Seat.new }
    200.times { |i| FULL[(n * 7 + i) % 500] ||= Entry.new }
  end,
  # No major collection.
  "idle" => nil
}

$stdout.sync = true
Report.run do
  round = ROUNDS.fetch(ARGV.fetch(0))
  done = false
  waiting = Thread.new { $stdin.gets; done = true }
  500.times { |i| FULL[i] = Entry.new }
  8.times { |n| round.call(n); GC.start } if round
  $stdout.puts "ready"
  n = 8
  until done
    if round
      round.call(n += 1)
      GC.start
    end
    sleep 0.2
  end
  waiting.join
end
