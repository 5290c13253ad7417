# Long strings: few objects, much memory from malloc. Runs for some seconds, or for as many rounds as are given.
require_relative "support"

SECONDS = Float(ARGV.fetch(0, "6"))
ROUNDS = Integer(ARGV.fetch(1, "0"))

KEPT = Array.new(40_000) { |i| i.to_s }

def round(number)
  list = Array.new(20) { |i| "line #{i} " * 2_000 }
  KEPT[number % KEPT.size] = list.last[0, 10]
  list.sum(&:size)
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
