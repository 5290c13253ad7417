# Measures what stops or interrupts a running thread: reads the clock in a loop and adds up the gaps between two readings that are
# longer than the argument, nanoseconds. Each line of standard input is a number of seconds for which to do so; the
# answer is one line, for `cargo xtask bench --stalls`. Nothing is allocated in the loop, so disabled GC costs no memory, and no
# collection counts as a stall. With a second argument it has so many objects.
LONGER_THAN = Integer(ARGV.fetch(0))
KEPT = Array.new(Integer(ARGV.fetch(1, 0))) { |i| "kept #{i}" }
GC.disable

def now = Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)

# A tracer's stack with this method in it is from the time that was measured.
def read_clock(seconds)
  gap_time = gaps = longest = 0
  first = last = now
  till = first + (seconds * 1_000_000_000).to_i
  while last < till
    # Not by `now`: another call would make each reading slower.
    reading = Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
    gap = reading - last
    if gap > LONGER_THAN
      gap_time += gap
      gaps += 1
      longest = gap if gap > longest
    end
    last = reading
  end
  "wall_ns=#{last - first} gap_ns=#{gap_time} gaps=#{gaps} longest_ns=#{longest}"
end

turn = 0
while (seconds = $stdin.gets)
  turn += 1
  $stdout.puts "#{read_clock(Float(seconds))} turn=#{turn}"
  $stdout.flush
end
