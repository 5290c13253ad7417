# A heap in the middle of a sweep, which has found pages without objects. From 3.4 on these are kept until the sweep ends.
require_relative "support"

kept = Array.new(500_000) { Object.new }
GC.start
kept = nil
GC.start(immediate_sweep: false)
700.times { Array.new(200) { Object.new } }
GC.disable
# `heap_allocated_pages` includes empty pages from 3.4 on.
$stdout.puts "#{GC.stat(:heap_allocated_pages)} #{GC.stat[:heap_empty_pages] || 0} pages"
$stdout.flush
$stdin.gets
