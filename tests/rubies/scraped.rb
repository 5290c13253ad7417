# Makes garbage for the given number of rounds, or with "2s" for this many seconds, and ends with no cycle open. With the argument "stay"
# it then waits for a line, so that others can inspect it, and it collects once before the work: its report has GC.stat after that.
require_relative "support"

SECONDS = ARGV.fetch(0, "40")[/\A(.*)s\z/, 1]&.to_f
ROUNDS = SECONDS ? nil : Integer(ARGV.fetch(0, "40"))

def clock
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

def produce_garbage(kept)
  Work.small(20_000)
  Work.keep(kept, 500)
end

settled = nil
if ARGV[1] == "stay"
  # All keys are there already, and the call is cached, so nothing is allocated between the collection and the reading.
  # What has a finalizer is freed after the collection that finds it, not by it.
  GC.stat(settled = {})
  2.times { GC.start }
  GC.stat(settled)
  $stdout.puts "#{settled[:count]} collections: settled"
  $stdout.flush
end
Report.run do |extra|
  extra["settled"] = settled
  kept = []
  sum = 0
  till = clock + SECONDS.to_f
  rounds = 0
  while SECONDS ? clock < till : rounds < ROUNDS
    produce_garbage(kept)
    sum += Work.checksum(2_000)
    kept.clear if kept.size > 200_000
    rounds += 1
  end
  GC.start
  extra["sum"] = sum
end
if ARGV[1] == "stay"
  $stdout.puts "worked"
  $stdout.flush
  $stdin.gets
end
