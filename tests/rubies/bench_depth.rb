# Uses CPU time at the bottom of a recursion of the given depth, once standard input ends: for `cargo xtask bench --depth`.
# Most of the time is spent in Ruby code: what a tick costs that hits the kernel is another question.
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
    return spin(Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) + 2.0)
  end
  descend(left - 1)
end

# `<main>` and `spin` are frames, too.
descend(Integer(ARGV.fetch(0)) - 3)
$stdout.puts "done"
