# Works until "end", with a major collection in each round, and keeps something of each round or nothing.
require_relative "support"

class Order; end
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
  -> { seen << Order.new }
end

COUNTER = counter

ROUNDS = {
  # Grow.
  "cache" => ->(n) { 300.times { CACHE << Order.new } },
  "closures" => ->(n) { 300.times { |i| CLOSURES << closure(i) } },
  "captured" => ->(n) { 300.times { COUNTER.call } },
  "strings" => ->(n) { 300.times { |i| Shop::Names.keep("a name that is too long to be embedded #{n} #{i}" * 2) } },
  # Are stable: only garbage, a ring whose elements are replaced, a cache that is full from the start.
  "garbage" => ->(n) { 2_000.times { Order.new } },
  "ring" => ->(n) { 300.times { |i| RING[(n * 300 + i) % RING.size] = Order.new } },
  "full" => ->(n) { 200.times { |i| FULL[(n * 7 + i) % 500] ||= Order.new } },
  # No major collection.
  "idle" => nil
}

$stdout.sync = true
Report.run do
  round = ROUNDS.fetch(ARGV.fetch(0))
  done = false
  waiting = Thread.new { $stdin.gets; done = true }
  500.times { |i| FULL[i] = Order.new }
  8.times { |n| round.call(n); GC.start } if round
  $stdout.puts "ready"
  n = 8
  until done
    if round
      round.call(n += 1)
      GC.start
    end
    sleep 0.4
  end
  waiting.join
end
