# Threads that wait in turn: each sleeps until its own point in the next tenth of a second. Arguments: number of threads, number of waits
# of each, number of further threads that sleep briefly and often all the time. Reports how many of these sleeps were really brief.
require_relative "support"

PERIOD = 0.1

def now
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

def in_turn(begun, times, place)
  times.times do |turn|
    rest = begun + (turn + 1) * PERIOD + place - now
    sleep rest if rest.positive?
  end
end

# At least this many brief sleeps of each thread are shorter than half a millisecond, unless that takes a minute.
BRIEF = 400

# Returns their number.
def restless(done, begun)
  brief = 0
  until done[0] && (brief >= BRIEF || now - begun > 60)
    before = now
    sleep 0.0001
    brief += 1 if now - before < 0.0005
  end
  brief
end

Report.run do |extra|
  count, times, busy = ARGV.map(&:to_i)
  # Times that began before gctrace saw the process are not seen.
  sleep 0.5
  done = [false]
  begun = now
  busy = busy.times.map { Thread.new { restless(done, begun) } }
  threads = count.times.map { |at| Thread.new { in_turn(begun, times, 0.05 * at / count) } }
  threads.each(&:join)
  done[0] = true
  extra["brief"] = busy.sum(&:value)
  extra["threads"] = count
end
