# Threads that sleep in all kinds of methods, and Ruby's own description of their stacks.
#
# A line for each frame, leaf first: `frame RACTOR THREAD LABEL BASE_LABEL OWNER PATH LINE`, separated by tabs, then
# `ready`. OWNER is the possible prefix of the method's name by reflection (`Class#`, `Class.` or `-`, separated by `|`
# where several methods have that name), `?` where the script does not know the method. At each line of standard input the script does what it says, and answers.
$stdout.sync = true
Warning[:experimental] = false if defined?(Warning) && Warning.respond_to?(:[]=)

def park
  sleep
end

module Greeting
  def greet
    yield
  end
end

module Loud
  def shout
    super
  end
end

class Person
  include Greeting
  prepend Loud
  include Comparable

  attr_reader :age

  def initialize(age, &block)
    @age = age
    block.call if block
  end

  def shout
    greet { [1].each { |_| park } }
  end

  def <=>(other)
    park if other.age == 7
    age <=> other.age
  end

  define_method(:defined) { |&block| 1.times { block.call } }

  def method_missing(name, *args)
    return super unless name == :ghost
    [args].map { park }
  end

  def respond_to_missing?(name, all = false)
    name == :ghost || super
  end

  alias shout_again shout

  class << self
    def build
      new(1) { park }
    end

    def nested
      tap { |it| it.instance_eval { park } }
    end
  end

  def self.direct(&block)
    Util.helper(&block)
  end

  def rescued
    raise ArgumentError
  rescue ArgumentError
    [0].each { park }
  end

  def rescued_twice
    begin
      begin
        raise ArgumentError
      rescue ArgumentError => e
        raise IndexError
      end
    rescue IndexError
      park
    ensure
      @done = true
    end
  end

  def ensured
    return 1
  ensure
    park
  end
end

class Child < Person
  def initialize(*)
    super
  end

  def shout
    super
  end

  class Deeper
    def self.call
      lambda { park }.call
    end

    module Inner
      extend self
      def flat
        park
      end
    end
  end
end

module Util
  module_function

  def helper
    yield
  end
end

module Refined
  refine String do
    def refined
      tap { park }
    end
  end
end
using Refined

ANONYMOUS = [Class.new { def nameless; park; end }, Module.new { def self.nameless_module; park; end }]
SINGLE = Object.new
def SINGLE.alone
  [3, 1].sort_by { |n| park; n }
end

class Late; end
Late.class_eval("def evaluated\n\n  park\nend", "some/evaluated file.rb", 4711)

# Lines of one method, so many that the index over them has several blocks.
LONG = +"def long(n)\n  x = 0\n"
600.times { |n| LONG << "  x += #{n} if n == #{n}\n" << ("\n" * (n % 3)) }
LONG << "  park if n >= 0\n  x\nend\n"
Late.class_eval(LONG, "long.rb", 10)
SHORT = +"def medium(n)\n"
40.times { |n| SHORT << "  park if n == #{n}\n" }
Late.class_eval(SHORT << "end\n", "medium.rb", 1)

class Person
  def self.declare(name)
    define_method(name) { |n = 1| n.times { park } }
    define_singleton_method(:"#{name}_all") { park }
  end
  declare(:declared)
end

# Code that nothing keeps once its class is gone: the code in this file lives as long as the file.
20.times do |n|
  Object.const_set("Mortal#{n}", Class.new).class_eval(<<-CODE, "mortal.rb", n * 10 + 1)
    def mortal#{n}
      [1].each { park }
    end
  CODE
end

class Top
  PARKED = Thread.new { class << self; sleep; end }
end

def recursive(n)
  n.zero? ? park : recursive(n - 1)
end

def toplevel
  1.upto(1) { { a: 1 }.each_pair { "abc".gsub(/b/) { park } } }
end

scenarios = [
  -> { park },
  -> { toplevel },
  -> { recursive(40) },
  -> { Person.new(3).shout },
  -> { Child.new(3).shout },
  -> { Child.new(3).shout_again },
  -> { Person.new(3).defined { park } },
  -> { Person.new(3).ghost(1, 2) },
  -> { Person.build },
  -> { Person.nested },
  -> { Child.direct { park } },
  -> { Person.new(3).rescued },
  -> { Person.new(3).rescued_twice },
  -> { Person.new(3).ensured },
  -> { Person.new(3) < Person.new(7) },
  -> { [Person.new(7), Person.new(3)].max },
  -> { Child::Deeper.call },
  -> { Child::Deeper::Inner.flat },
  -> { "x".refined },
  -> { ANONYMOUS[0].new.nameless },
  -> { ANONYMOUS[1].nameless_module },
  -> { SINGLE.alone },
  -> { Late.new.evaluated },
  -> { Late.new.long(599) },
  -> { Late.new.long(0) },
  -> { Late.new.medium(0) },
  -> { Late.new.medium(25) },
  -> { Late.new.medium(39) },
  -> { Fiber.new { [1].each { park } }.resume },
  -> { Enumerator.new { |y| y << 1; park }.each { |_| } },
  -> { Enumerator.new { |_| park }.next },
  -> { Person.new(3).public_send(:shout) },
  -> { Person.new(3).send(:instance_exec) { park } },
  -> { Person.instance_method(:shout).bind(Person.new(1)).call },
  -> { Person.new(1).method(:shout).to_proc.call },
  -> { %i[park].each(&method(:send)) },
  -> { eval("park", binding, "in eval", 7) },
  -> { eval("[1].each { park }") },
  -> { Person.class_eval { [1].each { park } } },
  -> { Person.class_eval("1.times { park }", "class eval", 3) },
  -> { Class.new { park } },
  -> { Class.new(Person) { define_singleton_method(:inside) { park } }.inside },
  -> { loop { park } },
  -> { catch(:x) { [1].inject(0) { park } } },
  -> { Struct.new(:a).new(1).each { park } },
  -> { (1..3).each_slice(2) { park } },
  -> { [1, 2].each_with_index.map { park } },
  -> { Hash.new { |_, _| park }[1] },
  -> { Comparable.instance_method(:clamp); [2].sum { park } },
  -> { Mutex.new.synchronize { park } },
  -> { 3.times.lazy.map { park }.first },
  -> { at = proc { |n| n == 0 ? park : at.call(n - 1) }; at.call(3) },
  -> { [[[1]]].each { |a| a.each { |b| b.each { |c| park } } } },
  -> { Integer("1").then { park } },
  -> { Person.new(3).declared },
  -> { Person.declared_all },
  *Array.new(20) { |n| -> { Object.const_get("Mortal#{n}").new.send("mortal#{n}") } },
]
scenarios << -> { Data.define(:a).new(a: 1).then { park } } if defined?(Data) && Data.respond_to?(:define)

# The prefix of the methods of that owner.
def owner_prefix(owner)
  if owner.singleton_class?
    attached = ATTACHED[owner]
    return attached && attached.name ? "#{attached.name}." : "-"
  end
  refinement = owner.class.name == "Refinement" || owner.inspect.start_with?("#<refinement:")
  owner.name && !refinement ? "#{owner.name}#" : "-"
end

# The possible prefixes of the methods of each name.
def reflected
  known = Hash.new { |hash, key| hash[key] = [] }
  (ATTACHED.values + ATTACHED.keys + [SINGLE.singleton_class]).uniq.each do |mod|
    names = Module.instance_method(:instance_methods).bind(mod).call(false) +
            Module.instance_method(:private_instance_methods).bind(mod).call(false)
    names.each do |name|
      method = begin
        Module.instance_method(:instance_method).bind(mod).call(name)
      rescue NameError
        next
      end
      # Two levels are enough for the prepended modules here; some releases loop beyond that.
      2.times do
        break unless method
        prefix = owner_prefix(method.owner)
        [name.to_s, method.name.to_s, method.respond_to?(:original_name) && method.original_name.to_s].uniq.each do |key|
          known[key] << prefix if key && !known[key].include?(prefix)
        end
        method = method.respond_to?(:super_method) && method.super_method
      end
    end
  end
  # Ruby itself (3.4) puts the class before a block in `declare` that became a method of that class.
  known["declare"] << "Person#"
  known.default_proc = nil
  known
end

def describe(ractor, threads, known)
  threads.each_with_index do |thread, index|
    locations = thread.backtrace_locations or next
    locations.each do |at|
      prefix = known[at.base_label] ? known[at.base_label].join("|") : "?"
      puts ["frame", ractor, index, at.label, at.base_label, prefix, at.path, at.lineno].join("\t")
    end
  end
end

def asleep(threads)
  sleep 0.01 until threads.all? { |thread| thread.status == "sleep" }
end

MODULES = ObjectSpace.each_object(Module).to_a.reject(&:singleton_class?)
ATTACHED = MODULES.map { |mod| [Kernel.instance_method(:singleton_class).bind(mod).call, mod] }.to_h
KNOWN = reflected
threads = scenarios.map { |scenario| Thread.new(&scenario) }
ractors = []
if defined?(Ractor)
  ractors << Ractor.new do
    inner = [Thread.new { [1].each { sleep } }, Thread.new { Ractor.current; 1.times { 1.upto(2) { sleep } } }]
    sleep 0.01 until inner.all? { |thread| thread.status == "sleep" }
    lines = inner.each_with_index.flat_map do |thread, index|
      thread.backtrace_locations.map do |at|
        ["frame", 1, index + 1, at.label, at.base_label, "?", at.path, at.lineno].join("\t")
      end
    end
    $stdout.puts lines
    $stdout.puts "ractor"
    $stdout.flush
    sleep
  end
  sleep 0.5
end

# The reporter is the last thread, and is not described.
main = Thread.current
reporter = Thread.new do
  asleep(threads + [main, Top::PARKED])
  describe(0, [main, *(Thread.list - [main, Thread.current])], KNOWN)
  puts "ready"
  while (line = $stdin.gets)
    case line.chomp
    when "redefine"
      # The code that sleeps is replaced, its threads end, and the old code is freed and moved.
      threads.each(&:kill).each(&:join)
      [threads, scenarios, MODULES, ATTACHED, ANONYMOUS].each(&:clear)
      %i[Late Child Person Greeting Loud Util Refined ANONYMOUS].each { |name| Object.send(:remove_const, name) }
      20.times { |n| Object.send(:remove_const, "Mortal#{n}") }
      %i[toplevel recursive].each { |name| Object.send(:undef_method, name) }
      500.times do |n|
        Object.const_set("Other#{n}", Class.new).class_eval("def other#{n}\n  [1].each { park }\nend\n", "other.rb")
      end
      4.times { GC.start }
      500.times do |n|
        Object.const_set("More#{n}", Class.new).class_eval("def more#{n}\n  [1].each { park }\nend\n", "more.rb")
      end
      GC.compact if GC.respond_to?(:compact) rescue nil
      puts "redefined"
    end
  end
end
[1].each { reporter.join; sleep }
