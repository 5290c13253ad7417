# Spends CPU time in known shares and measures each part with the thread's own CPU clock: 50, 30
# and 20 % in three methods, then sorting, matching and compressing (C functions), then three threads at once.
require_relative "support"
begin
  require "zlib"
rescue LoadError
  # A Ruby built without it has one part less.
end

SLICE = 10_000_000
SCALE = Float(ARGV.fetch(0, "1"))

def cpu
  Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID, :nanosecond)
end

def spin(till)
  while cpu < till
    i = 0
    i += 1 while i < 20_000
  end
end

def alpha(till)
  spin(till)
end

def beta(till)
  spin(till)
end

def gamma(till)
  spin(till)
end

NUMBERS = Array.new(30_000) { |i| (i * 7_919) % 30_011 }
TEXT = "the quick brown fox jumps over the lazy dog " * 200
BYTES = (0...60_000).map { |i| ((i * i) >> 5) & 0xff }.pack("C*")

def sorting
  NUMBERS.sort
end

def matching
  TEXT.match?(/(?:[a-z]+ )*lazy cat/)
end

def compressing
  Zlib::Deflate.deflate(BYTES)
end

def measure(shares, name)
  before = cpu
  yield
  shares[name] = shares.fetch(name, 0) + cpu - before
end

Report.run do |extra|
  shares = {}
  (12 * SCALE).ceil.times do
    5.times { measure(shares, "alpha") { alpha(cpu + SLICE) } }
    3.times { measure(shares, "beta") { beta(cpu + SLICE) } }
    2.times { measure(shares, "gamma") { gamma(cpu + SLICE) } }
  end
  functions = {}
  parts = { "sorting" => :sorting, "matching" => :matching }
  parts["compressing"] = :compressing if defined?(Zlib)
  parts.each do |name, method|
    till = cpu + 40 * SLICE * SCALE
    measure(functions, name) { send(method) while cpu < till }
  end
  threads = {}
  workers = %w[first second third].each_with_index.map do |name, index|
    Thread.new do
      Thread.current.name = name
      measure(threads, name) { spin(cpu + (index + 1) * 8 * SLICE * SCALE) }
    end
  end
  workers.each(&:join)
  extra["shares"] = shares
  extra["functions"] = functions
  extra["threads"] = threads
end
