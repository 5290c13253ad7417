# Memory of known kinds: a string of 100 MB, four threads that sleep with something on their stacks, and objects.
require_relative "support"

BIG = "x" * 100_000_000
OBJECTS = Array.new(200_000) { |i| "kept #{i}" }

def deep(n)
  n.zero? ? sleep : [deep(n - 1)]
end

THREADS = Array.new(4) { Thread.new { Array.new(1000) { |i| "t" * (64 + i) }.then { deep(200) } } }
sleep 0.01 until THREADS.all? { |thread| thread.status == "sleep" }
GC.start
$stdout.puts "running"
$stdout.flush
$stdin.gets
