# Rows of a query as hashes, in a program that keeps next to nothing: a small heap, most of which is garbage. Runs for some seconds, or
# for as many rounds as are given.
require_relative "support"

SECONDS = Float(ARGV.fetch(0, "6"))
ROUNDS = Integer(ARGV.fetch(1, "0"))

def round(number)
  rows = Array.new(50) { |i| { "id" => i, "name" => "row #{i}", "price" => (number + i) * 1.5, "tags" => [i.to_s] } }
  rows.select { |row| row["id"].even? }.sum { |row| row["name"].size + row["tags"].size }
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
