# Strings of 60 kB that die at once, beside some that stay for a while: malloc starts most of the cycles. Runs for some seconds, or for as
# many rounds as are given.
require_relative "support"

SECONDS = Float(ARGV.fetch(0, "6"))
ROUNDS = Integer(ARGV.fetch(1, "0"))

KEPT = Array.new(300) { "x" * 60_000 }
INDEX = Array.new(100_000) { |i| i.to_s }

def round(number)
  list = Array.new(40) { |i| "blob #{i} " * 7_000 }
  KEPT[number % KEPT.size] = list.last
  list.sum(&:size) + INDEX[number % INDEX.size].size
end

def clock
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

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
