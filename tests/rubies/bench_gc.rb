# A GC-heavy script with a fixed amount of work: a tree of live objects and a stream of short-lived ones. `cargo xtask bench`
# reads its last line.

def clock(id) = Process.clock_gettime(id)

scale = Float(ARGV.fetch(0, "1"))
wall = clock(Process::CLOCK_MONOTONIC)
cpu = clock(Process::CLOCK_PROCESS_CPUTIME_ID)

live = Array.new(60_000) { |i| { id: i, name: "n#{i}", list: [i, i + 1] } }
check = 0
(1_500_000 * scale).to_i.times do |i|
  row = { id: i, text: "row #{i}", parts: [i, i.to_s, nil] }
  check += row[:text].size
  live[i % live.size] = row if (i % 7).zero?
end

cpu = clock(Process::CLOCK_PROCESS_CPUTIME_ID) - cpu
wall = clock(Process::CLOCK_MONOTONIC) - wall
puts format("wall=%.6f cpu=%.6f gc=%d check=%d", wall, cpu, GC.count, check)
