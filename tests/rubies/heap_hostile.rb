# Overwrites slots of its own heap with what no Ruby would put there, as a program with a bug in C code, or one that wants to harm a
# reader of its memory. With the argument "dying" it ends at some moment while it is read.
require "fiddle"
require "objspace"

GC.disable
WORD = Fiddle::SIZEOF_VOIDP

def address(object)
  return Fiddle.dlwrap(object) if Fiddle.respond_to?(:dlwrap)
  object.object_id << 1
end

def poke(address, *words)
  Fiddle::Pointer.new(address)[0, words.size * WORD] = words.pack("Q*")
end

# Addresses that are not mapped, not aligned, of the kernel, of the other end, and of the slot itself.
WILD = [0x10, 0x7ff0_dead_b001, 0xffff_8000_0000_0000, 0xffff_ffff_ffff_fff8, 0x5555_0000_0000].freeze
T_TYPES = (0..0x1f).to_a.freeze
seed = 20_261_128
RANDOM = -> { seed = (seed * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) & 0xffff_ffff_ffff_ffff }

# Each type with wild pointers and lengths, and with pointers to itself.
# Their places are known.
ObjectSpace.trace_object_allocations_start
VICTIMS = Array.new(4_000) { Object.new }
ObjectSpace.trace_object_allocations_stop
VICTIMS.each_with_index do |victim, i|
  at = address(victim)
  flags = T_TYPES[i % T_TYPES.size] | (RANDOM.call & 0xffff_ffff_ffff_ffe0)
  words = Array.new(4) do
    case RANDOM.call >> 60
    when 0..4 then WILD[(RANDOM.call >> 33) % WILD.size]
    when 5..8 then at
    when 9..10 then address(VICTIMS[(RANDOM.call >> 33) % VICTIMS.size])
    when 11 then 0x7fff_ffff_ffff_ffff
    else RANDOM.call
    end
  end
  poke(at, flags, *words)
end

# Classes whose superclass is themselves, or each other, and one that is gone.
class Circle; end
class One; end
class Two; end
class Gone; end
CHAINS = [Circle, One, Two, Gone].map { |klass| Array.new(50) { klass.new } }
super_at = address(Circle) + 2 * WORD
poke(super_at, address(Circle))
poke(address(One) + 2 * WORD, address(Two))
poke(address(Two) + 2 * WORD, address(One))
poke(address(Gone), 0)

$stdout.puts "hostile"
$stdout.flush
if ARGV.include?("dying")
  sleep(rand(0.0..0.06))
  Process.kill(:KILL, Process.pid)
end
$stdin.gets
# Nothing of this heap may be freed.
$stdout.puts "alive"
$stdout.flush
Process.exit!(0)
