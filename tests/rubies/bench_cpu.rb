# A CPU-bound script with a fixed amount of work that allocates next to nothing. `cargo xtask bench` reads its
# last line.

def clock(id) = Process.clock_gettime(id)

scale = Float(ARGV.fetch(0, "1"))
wall = clock(Process::CLOCK_MONOTONIC)
cpu = clock(Process::CLOCK_PROCESS_CPUTIME_ID)

state = 1
check = 0
limit = (40_000_000 * scale).to_i
i = 0
while i < limit
  state = (state * 1_103_515_245 + 12_345) & 0x7fff_ffff
  check ^= state if state & 7 == 3
  i += 1
end

cpu = clock(Process::CLOCK_PROCESS_CPUTIME_ID) - cpu
wall = clock(Process::CLOCK_MONOTONIC) - wall
puts format("wall=%.6f cpu=%.6f gc=%d check=%d", wall, cpu, GC.count, check)
