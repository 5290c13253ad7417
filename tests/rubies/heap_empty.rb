# A heap in the middle of a sweep, which has found pages without objects. From 3.4 on these are kept until the sweep ends.
require_relative "support"

kept = Array.new(500_000) { Object.new }
GC.start
kept = nil
GC.start(immediate_sweep: false)
# A program that allocates sweeps; `GC.disable` would end the sweep.
2_000.times do
  break if GC.stat[:heap_empty_pages].to_i > 60
  Array.new(100) { Object.new }
end
# `heap_allocated_pages` includes empty pages from 3.4 on.
$stdout.puts "#{GC.stat(:heap_allocated_pages)} #{GC.stat[:heap_empty_pages] || 0} pages"
$stdout.flush
$stdin.gets
