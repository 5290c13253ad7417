# Makes garbage and ends with no cycle open. With the argument "stay" it then waits for a line, so that others can look at it.
require_relative "support"

ROUNDS = Integer(ARGV.fetch(0, "40"))

def produce_garbage(kept)
  Work.small(20_000)
  Work.keep(kept, 500)
end

Report.run do |extra|
  kept = []
  sum = 0
  ROUNDS.times do
    produce_garbage(kept)
    sum += Work.checksum(2_000)
  end
  GC.start
  extra["sum"] = sum
end
if ARGV[1] == "stay"
  $stdout.puts "worked"
  $stdout.flush
  $stdin.gets
end
