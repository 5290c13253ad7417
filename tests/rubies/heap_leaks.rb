# Works until "end", with a major collection in each round, and keeps something of each round or nothing. What is kept in different ways
# has different classes. Tests find the lines that allocate by the names behind "allocates".
require_relative "support"
require "set"
require ENV["GCTRACE_TEST_MALLOC_WITNESS"] if ENV["GCTRACE_TEST_MALLOC_WITNESS"]

class Order; end
class Item; end
class Session; end
class Listener < Proc; end
class Scrap; end
class Seat; end
class Entry; end
class Job; end
class Visit; end
class Coupon; end
class Coin; end
class Stamp; end
class Ticket; end
class Vote; end
class Wish; end
class Waiter; end
class Alarm < Proc; end
class Line; end
class Parcel; end
class Guest; end
class Sale; end
class Refund; end
class Tip; end
class Draft; end
class Memo; end
class Toll; end
class Good; end
class Visa; end
class Version; end
class Book; end
class Card; end
class Seal; end
class Gift; end
class Parent
  def initialize
    @line = Line.new # allocates Line
  end
end

# Holders with variables of their own, or with a class of their own.
class Shelf < Hash
  def initialize
    super
    @max = 9
  end
end

module Ribbon; end
class Box
  def initialize
    @one = Gift.new # allocates Gift
    @two = Gift.new # allocates Gift
    @three = Gift.new # allocates Gift
    extend Ribbon
  end
end
SHELF = Shelf.new
CARDS = []
CARDS.instance_variable_set(:@max, CARDS.object_id)
SEALS = Set.new
BOXES = []
CACHE = []
CLOSURES = []
module Shop
  class Names
    BY_ID = {}
    private_constant :BY_ID

    def self.keep(name)
      BY_ID[name] = true # allocates String
    end
  end
end

module Shop
  class Basket
    @@open = []

    def self.keep
      @@open << new # allocates Shop::Basket
    end
  end

  # Variables that hold nothing come before the one that does.
  module Desk
    @name = "a desk"
    @coupons = []
    @closed = false

    def self.keep
      @coupons << Coupon.new # allocates Coupon
    end
  end

  class Vault
    class << self
      COINS = []

      def keep
        COINS << Coin.new # allocates Coin
      end
    end
  end
end

NAMELESS = Class.new do
  @stamps = []

  def self.keep
    @stamps << Stamp.new # allocates Stamp
  end
end

# A lambda for each ticket, which is made in a block inside of a method: only the variables of the block refer to the ticket, and only the
# lambda to them.
class Feed
  class << self
    attr_reader :main
  end

  def initialize
    @listeners = []
  end

  def subscribe
    1.times do
      ticket = Ticket.new # allocates Ticket
      @listeners << -> { ticket } # allocates Proc
    end
  end

  @main = new
end

# What one lambda keeps: the variables of the method around the block that it is made in.
class Tally
  @@count = nil

  def self.begin
    votes = []
    1.times { @@count = -> { votes << Vote.new } } # allocates Vote
  end

  def self.count
    @@count.call
  end
end
Tally.begin

# What a lambda with an instance variable keeps.
module Wishes
  def self.keeper
    wishes = []
    -> { wishes << Wish.new } # allocates Wish
  end

  KEEPER = keeper
  KEEPER.instance_variable_set(:@about, "wishes")
end

# What a block is called for: only `self` in it refers to the waiter.
class Waiter
  def alarm
    Alarm.new { self } # allocates Alarm
  end
end

class Bus
  def initialize
    @listeners = []
  end

  def on(&block)
    @listeners << Listener.new(&block) # allocates Listener
  end
end

BUS = Bus.new
PARENTS = []
ALARMS = []
RING = Array.new(2_000)
FULL = {}
QUEUE = []
RECENT = {}
SPARSE = []

def bought
  Order.new # allocates Order
end

def imported
  Order.new # allocates Order
end

# Never kept: a line that must not be named, though it uses the same slots.
def estimated
  Order.new
end

def closure(number)
  -> { number + 1 } # allocates Proc
end

def counter
  seen = []
  -> { seen << Item.new } # allocates Item
end

def visited
  (Thread.current[:sessions] ||= []) << Session.new # allocates Session
end

COUNTER = counter

# What globals and threads have. Those that have nothing, or something else, come before and behind.
$address = nil
$labels = %w[a b c]
$parcels = []
$posted = []

def posted
  $parcels << Parcel.new # allocates Parcel
end

def invited
  Thread.current.thread_variable_set(:colours, %w[red green])
  guests = Thread.current.thread_variable_get(:guests)
  Thread.current.thread_variable_set(:guests, guests = []) unless guests
  guests << Guest.new # allocates Guest
end

# Instance variables of a thread, which are where its variables are.
def refunded
  refunds = Thread.current.thread_variable_get(:refunds)
  unless refunds
    Thread.current.instance_variable_set(:@tips, { all: [] })
    Thread.current.thread_variable_set(:refunds, refunds = [])
  end
  refunds << Refund.new # allocates Refund
  Thread.current.instance_variable_get(:@tips)[:all] << Tip.new # allocates Tip
end

def noted
  (Fiber[:memos] ||= []) << Memo.new # allocates Memo
end

# A fiber that mostly waits.
def drafts
  Thread.current[:drafts] = []
  loop do
    600.times { Thread.current[:drafts] << Draft.new } # allocates Draft
    Fiber.yield
  end
end

TILL = Queue.new
SOLD = Queue.new

def sells
  Thread.current[:shift] = "a shift"
  Thread.current[:sales] = []
  Thread.current[:open] = true
  loop do
    TILL.pop.times { Thread.current[:sales] << Sale.new } # allocates Sale
    SOLD << true
  end
end

# What is spread over objects that have names: four constants, a variable of each of four classes, a local of each of three threads.
# No array holds all of the constants.
4.times { |i| Object.const_set("TOLL#{i}", []) }

class Depot
  def self.keep(good)
    (@goods ||= []) << good
  end
end
DEPOTS = Array.new(4) { |i| Object.const_set("Depot#{i}", Class.new(Depot)) }.freeze
DESKS = Array.new(3) { Queue.new }
STAMPED = Queue.new

def stamps(desk)
  Thread.current[:visas] = []
  loop do
    desk.pop.times { Thread.current[:visas] << Visa.new } # allocates Visa
    STAMPED << true
  end
end

# A list that is replaced with each change.
$versions = []
LOOSE = []

ROUNDS = {
  # All grow: what an array of a constant has, and procs, what the variables of a closure have, and strings in a hash of a private one.
  # Garbage of random amounts lies between, so that no line is always at the end of a page.
  "all" => lambda do |n|
    600.times do |i|
      CACHE << (rand < 0.7 ? bought : imported)
      estimated if rand < 0.7
      CLOSURES << closure(i)
      COUNTER.call
      rand(3).times { Scrap.new }
      Shop::Names.keep("a name that is too long to be embedded #{n} #{i}" * 2) # allocates String
    end
  end,
  # Listeners of an object, what a thread has, and what `self` is in blocks.
  "others" => lambda do |n|
    600.times do |i|
      BUS.on { i }
      visited
      ALARMS << Waiter.new.alarm # allocates Waiter
      rand(3).times { Scrap.new }
    end
  end,
  # What global variables and threads have: the main thread, and one with a name.
  "globals" => lambda do |n|
    $clerk ||= Thread.new { sells }.tap { |clerk| clerk.name = "clerk 1" }
    600.times do
      posted
      invited
      visited
      rand(3).times { Scrap.new }
    end
    TILL << 600
    SOLD.pop
  end,
  # What fibers and instance variables of threads have.
  "fibers" => lambda do |n|
    $writer ||= Fiber.new { drafts }
    600.times do
      refunded
      noted if Fiber.respond_to?(:[])
      rand(3).times { Scrap.new }
    end
    $writer.resume
  end,
  # What variables of classes and modules have, a constant of a singleton class, and a lambda with a variable of its own.
  "classes" => lambda do |n|
    600.times do
      Shop::Basket.keep
      Shop::Desk.keep
      Shop::Vault.keep
      NAMELESS.keep
      Wishes::KEEPER.call
      rand(3).times { Scrap.new }
    end
  end,
  # What a hash and an array with instance variables keep, a set, and objects of which each has a singleton class.
  "holders" => lambda do |n|
    600.times do |i|
      SHELF[n * 600 + i] = Book.new # allocates Book
      CARDS << Card.new # allocates Card
      SEALS << Seal.new # allocates Seal
      # Naming many singleton classes would take longer than the program takes for a round.
      BOXES << Box.new if i % 20 == 0
      rand(3).times { Scrap.new }
    end
  end,
  # What lambdas keep, each an object or one of them all, and what objects keep, each one.
  "lambdas" => lambda do |n|
    600.times do
      Feed.main.subscribe
      Tally.count
      PARENTS << Parent.new # allocates Parent
      rand(3).times { Scrap.new }
    end
  end,
  # What is spread over objects with names, in a pattern that repeats.
  "spread" => lambda do |n|
    $desks ||= DESKS.map { |desk| Thread.new { stamps(desk) } }
    200.times do
      4.times { |i| Object.const_get("TOLL#{i}") << Toll.new } # allocates Toll
      4.times { |i| DEPOTS[i].keep(Good.new) } # allocates Good
    end
    DESKS.each { |desk| desk << 200 }
    DESKS.each { STAMPED.pop }
  end,
  # A list that is replaced by a copy with each change.
  "copies" => lambda do |n|
    100.times { $versions += Array.new(6) { Version.new } } # allocates Version
    $copier ||= Thread.new do
      loop do
        $versions += []
        sleep 0.001
      end
    end
  end,
  # Objects without write barrier: they never become old.
  "loose" => ->(n) { 300.times { LOOSE << Random.new(1) } },
  # All are stable: only garbage, a ring whose elements are replaced, a cache that is full from the start.
  "stable" => lambda do |n|
    2_000.times { Scrap.new }
    300.times { |i| RING[(n * 300 + i) % RING.size] = Seat.new }
    200.times { |i| FULL[(n * 7 + i) % 500] ||= Entry.new }
  end,
  # A queue whose length varies, and which is empty now and then.
  "queue" => lambda do |n|
    QUEUE.clear if rand < 0.2
    rand(2_000).times { QUEUE << Job.new }
    QUEUE.shift(rand(3_000))
  end,
  # The last visits only, and threads that end with what they have.
  "recent" => lambda do |n|
    500.times { |i| RECENT["#{n} #{i}"] = Visit.new }
    RECENT.shift while RECENT.size > 3_000
    Thread.new { 100.times { visited } }.join
  end,
  # An extension keeps memory that belongs to no object.
  "extension" => ->(n) { MallocWitness.malloc(1_000, 5_000) },
  # Of many objects few are kept, at once, all over the heap.
  "sparse" => lambda do |n|
    if SPARSE.empty?
      all = Array.new(300_000) { |i| i % 12 == 0 ? Entry.new : Scrap.new }
      SPARSE.concat(all.grep(Entry))
    end
    500.times { Scrap.new }
  end,
  # No major collection.
  "idle" => nil
}

$stdout.sync = true
srand 1
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
