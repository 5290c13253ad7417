# Uses CPU time at the bottom of a recursion of the given depth, once standard input ends: for `cargo xtask bench --depth`.
# Most of the time is spent in Ruby code, so that few ticks hit the kernel, which would cost something else. Long enough that the
# first 1,024 stacks, which wake gctrace at once, are the smaller part.
def spin(till)
  while Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) < till
    left = 10_000
    left -= 1 while left > 0
  end
end

def descend(left)
  if left.zero?
    $stdout.puts "ready"
    $stdout.flush
    $stdin.read
    return spin(Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) + 5.0)
  end
  descend(left - 1)
end

# `<main>` and `spin` are frames, too.
descend(Integer(ARGV.fetch(0)) - 3)
$stdout.puts "done"
