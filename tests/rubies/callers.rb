# Burns CPU at many known places. At each it records Ruby's own stack; a profiler must have seen
# exactly these stacks and no others.
require_relative "support"

module Oracle
  MILLISECONDS = Integer(ENV.fetch("GCTRACE_TEST_BURN_MS", "40"))

  # Records the stack of its caller, then spins in this frame. Every place has one line that calls it.
  def self.burn(places, name)
    places << [name, caller_locations(1).map { |at| [at.path, at.lineno, at.label, at.base_label] }]
    spin
  end

  def self.spin
    clock = Process::CLOCK_THREAD_CPUTIME_ID
    till = Process.clock_gettime(clock, :millisecond) + MILLISECONDS
    while Process.clock_gettime(clock, :millisecond) < till
      i = 0
      while i < 50_000
        i += 1
      end
    end
  end
end

class Plain
  def initialize(places, name = nil)
    @places = places
    Oracle.burn(places, name) if name
  end

  def method_of_a_class
    Oracle.burn(@places, "method")
  end

  def in_blocks
    [1].each { [2].map { 1.times { Oracle.burn(@places, "blocks") } } }
  end

  def deep(levels)
    return Oracle.burn(@places, "recursion") if levels.zero?

    deep(levels - 1)
  end

  def method_missing(name, *arguments)
    return super unless name == :nobody_defined_this

    Oracle.burn(@places, "method_missing")
  end

  def respond_to_missing?(name, all = false)
    name == :nobody_defined_this || super
  end

  define_method(:by_define_method) { Oracle.burn(@places, "define_method") }

  def rescuing
    raise "on purpose"
  rescue StandardError
    Oracle.burn(@places, "rescue")
  end

  def ensuring
    1 + 1
  ensure
    Oracle.burn(@places, "ensure")
  end

  def <=>(_other)
    Oracle.burn(@places, "comparison by C") unless @compared
    @compared = true
    0
  end
  include Comparable

  def aliased
    Oracle.burn(@places, "alias")
  end
  alias another_name aliased

  def each
    yield 1
  end
  include Enumerable

  protected

  def hidden
    Oracle.burn(@places, "protected")
  end

  public

  def calls_hidden
    hidden
  end

  class << self
    def of_the_class(places)
      Oracle.burn(places, "singleton method")
    end
  end
end

module Mixed
  def from_a_module
    Oracle.burn(@places, "included module")
  end
end

module Before
  def overridden
    super
  end
end

class Derived < Plain
  include Mixed
  prepend Before

  def overridden
    Oracle.burn(@places, "under a prepended module")
  end

  def in_blocks
    super
  end
end

module Functions
  module_function

  def of_a_module(places)
    Oracle.burn(places, "module function")
  end
end

module Refined
  refine String do
    def burning(places)
      Oracle.burn(places, "refinement")
    end
  end
end
using Refined

class Outer
  module Inner
    class Deepest
      def method_with_a_long_way(places)
        Oracle.burn(places, "nested names")
      end
    end
  end
end

def of_the_main_object(places)
  Oracle.burn(places, "method of main")
end

def with_all_argument_kinds(places, name: "keywords", **rest, &block)
  block.call(places, name, rest)
end

places = []
elsewhere = []

Report.run do |extra|
  plain = Plain.new(places)
  Plain.new(places, "initialize")
  plain.method_of_a_class
  plain.in_blocks
  plain.deep(800)
  plain.nobody_defined_this
  plain.by_define_method
  plain.rescuing
  plain.ensuring
  plain.another_name
  plain.calls_hidden
  Plain.of_the_class(places)
  [plain, Plain.new(places)].sort
  derived = Derived.new(places)
  derived.from_a_module
  derived.overridden
  Functions.of_a_module(places)
  "text".burning(places)
  Outer::Inner::Deepest.new.method_with_a_long_way(places)
  of_the_main_object(places)
  with_all_argument_kinds(places, other: 1) { |list, name, _rest| Oracle.burn(list, name) }
  plain.public_send(:instance_exec) { Oracle.burn(@places, "instance_exec") }
  plain.map { Oracle.burn(places, "Enumerable") }
  "a-b".sub("-") { Oracle.burn(places, "sub with a block") && "" }
  { 1 => 2 }.each_pair { |_key, _value| Oracle.burn(places, "each_pair") }
  eval("Oracle.burn(places, 'eval')", binding, "evaluated.rb", 77)
  Plain.class_eval("def from_text\n  Oracle.burn(@places, 'class_eval')\nend", "written.rb", 500)
  plain.from_text
  anonymous = Class.new do
    def named(places)
      Oracle.burn(places, "anonymous class")
    end
  end
  anonymous.new.named(places)
  object = Object.new
  def object.only_here(places)
    Oracle.burn(places, "singleton of an object")
  end
  object.only_here(places)
  lambda { |list| Oracle.burn(list, "lambda") }.call(places)
  proc_of_a_method = plain.method(:aliased).to_proc
  [nil].each { proc_of_a_method.call }
  Fiber.new { Oracle.burn(places, "fiber") }.resume
  Enumerator.new { |out| Oracle.burn(places, "enumerator"); out << 1 }.next
  Thread.new { Oracle.burn(elsewhere, "thread") }.join
  Thread.new { Fiber.new { [1].each { Oracle.burn(elsewhere, "fiber of a thread") } }.resume }.join
  catch(:done) { throw :done, Oracle.burn(places, "catch") }
  ObjectSpace.each_object(Class).first(1).each { Oracle.burn(places, "after a heap walk") }
  begin
    raise ArgumentError
  rescue ArgumentError
    [1].each { Oracle.burn(places, "block in rescue") }
  end
  extra["places"] = places + elsewhere
end
