# A cache of strings of 80 bytes that is full and goes on to be replaced, and garbage of other sizes beside it. From 3.2 on two heaps of
# several run out of slots. Runs for some seconds, or for as many rounds as are given.
require_relative "support"

SECONDS = Float(ARGV.fetch(0, "6"))
ROUNDS = Integer(ARGV.fetch(1, "0"))

SIZE = 200_000
CACHE = {}

def round(number)
  (number * 1000...(number + 1) * 1000).each { |n| CACHE[n % SIZE] = "value of the entry #{n} " * 2 }
  Array.new(1000) { |i| i.to_s }
end

def clock
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

(SIZE / 1000).times { |number| round(number) }
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
