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

Report.run do |extra|
  GC.start
  GC.disable
  MallocWitness.malloc(40 * MIB, 5)
  say "counting"
  if $stdin.gets.strip == "churn"
    MallocWitness.churn(48, 400_000)
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
