# Threads that work in spans, each in a method that is named after its span, and outside of any. A line on standard input makes it load the
# library that publishes them (before that nothing does), the next one ends it. The main thread forks a child, which works likewise.
require "rbconfig"

SPANS = 6
ROUNDS = 24
TRACE = "\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f".b

def work
  # CPU time of the thread: in other time it may only wait, and then no sample sees it.
  until_ns = Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID, :nanosecond) + 3_000_000
  until_ns > Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID, :nanosecond) or return while Array.new(20) { +"x" }
end

# Method `in_N` works while the span N of the trace N is active, and only then.
SPANS.times do |n|
  trace, span = TRACE + (n + 1).chr, "\xa0\x00\x00\x00\x00\x00\x00".b + (n + 1).chr
  define_method(:"enter_#{n}") { Spans.enter(trace, span) }
  define_method(:"tear_#{n}") { Spans.tear(trace, span) }
  eval("def in_#{n}; work; end")
end
def in_none; work; end
def in_torn; work; end
def in_nowhere; work; end
def in_sleep; sleep(0.003); end

def one(n)
  send(:"enter_#{n}")
  send(:"in_#{n}")
  Spans.leave
  in_none
  send(:"tear_#{n}")
  in_torn
  Spans.point(8)
  in_nowhere
  Spans.leave
  # Away from a CPU, in the last span.
  enter_0
  in_sleep
  Spans.leave
end

# Each thread takes this many seconds and at least this many rounds.
def all(seconds, rounds)
  threads = 3.times.map do |t|
    Thread.new do
      over = Process.clock_gettime(Process::CLOCK_MONOTONIC) + seconds
      n = t
      done = 0
      while done < rounds || Process.clock_gettime(Process::CLOCK_MONOTONIC) < over
        one(n = (n + 1) % SPANS)
        done += 1
      end
    end
  end
  threads.each(&:join)
end

def say(text)
  $stdout.puts text
  $stdout.flush
end

say "ready"
$stdin.gets
require ENV.fetch("GCTRACE_TEST_SPANS")
# In the first milliseconds after a library was loaded, and after a fork, spans are not known.
sleep 0.3
all(Float(ARGV.fetch(0)), ROUNDS)
# A fork has one thread, with the context of the one that forked.
child = fork { sleep 0.3; all(Float(ARGV.fetch(0)) / 2, ROUNDS / 2) }
Process.wait(child)
say "done"
$stdin.gets
