# A request loop: a large set of old objects stays, each request makes objects that die with it. Runs for some seconds
# and rests for a quarter of them; or for as many requests as are given, without any rest.
require_relative "support"

SECONDS = Float(ARGV.fetch(0, "6"))
REQUESTS = Integer(ARGV.fetch(1, "0"))

KEPT = Array.new(60_000) { |i| [i, i.to_s] }

def request(number)
  list = Array.new(400) { |i| { number: number, text: "line #{i}" } }
  list.sum { |line| line[:text].size }
end

def clock
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

# Starting a program is not part of its work.
3.times { GC.start }
300.times { |number| request(number) }

Report.run do |extra|
  till = (begun = clock) + SECONDS
  number = 0
  while REQUESTS > 0 ? number < REQUESTS : clock < till
    request(number)
    number += 1
    # Old objects come and go, so that there are major collections.
    (0...20).each { |i| KEPT[(number * 20 + i) % KEPT.size] = [number, i.to_s] }
    if REQUESTS.zero? && number % 500 == 0
      sleep (clock - begun) / 3
      begun = clock
    end
  end
  extra["requests"] = number
  extra["peak_rss_kib"] = Host.peak_rss_kib
end
