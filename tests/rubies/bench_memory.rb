# A stream of short-lived objects beside a tree of live ones, and strings that malloc holds. Each line of standard input asks for a fixed amount
# of that work; the answer is what it took, for `cargo xtask bench --memory`.

def clock(id) = Process.clock_gettime(id, :nanosecond)

LIVE = Array.new(60_000) { |i| { id: i, name: "n#{i}", list: [i, i + 1] } }
KEPT = Array.new(2_000) { |i| "k" * (i % 4_000) }

def work(rounds)
  check = 0
  rounds.times do |i|
    row = { id: i, text: "row #{i}", parts: [i, i.to_s, nil] }
    check += row[:text].size
    LIVE[i % LIVE.size] = row if (i % 7).zero?
    KEPT[i % KEPT.size] = "k" * (i % 4_000) if (i % 50).zero?
  end
  check
end

while (rounds = $stdin.gets)
  wall = clock(Process::CLOCK_MONOTONIC)
  cpu = clock(Process::CLOCK_PROCESS_CPUTIME_ID)
  objects = GC.stat(:total_allocated_objects)
  work(Integer(rounds))
  cpu = clock(Process::CLOCK_PROCESS_CPUTIME_ID) - cpu
  wall = clock(Process::CLOCK_MONOTONIC) - wall
  $stdout.puts "wall_ns=#{wall} cpu_ns=#{cpu} objects=#{GC.stat(:total_allocated_objects) - objects}"
  $stdout.flush
end
