# A large live heap: two hundred thousand old objects, each round replaces a few of them and makes some garbage. Runs for some
# seconds, or for as many rounds as are given.
require_relative "support"

SECONDS = Float(ARGV.fetch(0, "6"))
ROUNDS = Integer(ARGV.fetch(1, "0"))

KEPT = Array.new(200_000) { |i| [i] }

def round(number)
  (0...500).each { |i| KEPT[(number * 500 + i) % KEPT.size] = [number] }
  Array.new(300) { |i| [i, i] }
end

def clock
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

# Starting a program is not part of its work.
3.times { GC.start }

Report.run do |extra|
  till = clock + SECONDS
  number = 0
  while ROUNDS > 0 ? number < ROUNDS : clock < till
    round(number)
    number += 1
  end
  extra["rounds"] = number
  extra["peak_rss_kib"] = Host.peak_rss_kib
end
