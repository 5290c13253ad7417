# Allocates known amounts through CRuby's allocation functions when it gets a line. Sizes are of classes that a small script uses for
# nothing else: 2 to 64 MiB, of memory that is never touched.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_MALLOC_WITNESS")

MIB = 1 << 20

def say(text)
  $stdout.puts text
  $stdout.flush
end

# Collections that start meanwhile: only those that the script asks for, since the GC is disabled otherwise.
def ages
  before = GC.count
  yield
  GC.count - before
end

# Methods that ask for known amounts, each at one line.
module Places
  LINES = {}

  LINES["tiny"] = __LINE__ + 2
  def self.tiny
    MallocWitness.churn(48, 100_000)
  end

  LINES["small"] = __LINE__ + 2
  def self.small
    MallocWitness.churn(4096, 4_000)
  end

  LINES["large"] = __LINE__ + 2
  def self.large
    MallocWitness.churn(3 * MIB, 50)
  end

  LINES["moved"] = __LINE__ + 3
  def self.kept
    MallocWitness.malloc(9_000, 600)
    MallocWitness.realloc(20_000)
  end

  LINES["kept"] = LINES["moved"] - 1

  LINES["stays"] = __LINE__ + 2
  def self.stays
    MallocWitness.malloc(70_000, 40)
  end

  LINES["strings"] = __LINE__ + 4
  def self.strings
    # Its own buffer is smaller than the period, and of another line.
    kept = Array.new(300)
    300.times { |at| kept[at] = "x" * 90_000 }
    kept
  end
end

Report.run do |extra|
  GC.start
  GC.disable
  MallocWitness.malloc(40 * MIB, 5)
  say "counting"
  order = $stdin.gets.strip
  if order == "churn"
    MallocWitness.churn(48, 400_000)
  elsif order == "burst"
    MallocWitness.churn(1 << 16, 20_000)
  elsif order == "places"
    MallocWitness.free
    strings = %i[tiny small large kept stays strings].map { |name| Places.public_send(name) }.last
    extra.merge!(Places::LINES)
    extra["kept_strings"] = strings.size
  else
    MallocWitness.free
    extra["at_once"] = ages do
      MallocWitness.malloc(3 * MIB, 20)
      MallocWitness.free
    end
    extra["later"] = ages do
      MallocWitness.calloc(5 * MIB, 15)
      2.times { GC.start }
      MallocWitness.free
    end
    extra["moved"] = ages do
      MallocWitness.malloc(3 * MIB, 10)
      GC.start
      MallocWitness.realloc(10 * MIB)
      2.times { GC.start }
      MallocWitness.free
    end
    begin
      MallocWitness.malloc(1 << 62, 1)
    rescue NoMemoryError
      extra["refused"] = 1
    end
    # Strings of the interpreter's own making.
    extra["strings"] = Array.new(300) { "x" * 70_000 }.size
    # Left at the end.
    MallocWitness.malloc2(2, 10 * MIB, 7)
  end
  say "counted"
  $stdin.gets
  MallocWitness.free
end
