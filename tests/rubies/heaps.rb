# Explicit collections, each followed at once by reading every number of GC.stat_heap without allocating (from 3.2 on).
require_relative "support"

rounds = Integer(ARGV[0] || 6)
Report.run do |extra|
  seen = extra["heaps"] = []
  if GC.respond_to?(:stat_heap)
    size = GC.stat_heap.size
    keys = GC.stat_heap(0).keys
    tables = Array.new(rounds) { Array.new(size) { Array.new(keys.size) } }
    read = lambda do |table|
      heap = 0
      while heap < size
        key = 0
        while key < keys.size
          table[heap][key] = GC.stat_heap(heap, keys[key])
          key += 1
        end
        heap += 1
      end
    end
    # Files and other objects with finalizers, left by loading, are freed after the sweep that finds them, not by it.
    2.times { GC.start }
    # Calls fill their caches.
    2.times { read.call(tables[0]) }
    counts = Array.new(rounds)
    rounds.times do |round|
      Work.small(3_000 * (round + 1))
      GC.start
      read.call(tables[round])
      counts[round] = GC.count
    end
    rounds.times do |round|
      heaps = tables[round].each_with_index.to_h { |values, heap| [heap, keys.zip(values).to_h] }
      seen << { "count" => counts[round], "heaps" => heaps }
    end
  else
    rounds.times { GC.start }
  end
end
