# A method without calls, which a just-in-time compiler compiles: its code stores its place nowhere while it runs.
def leaf(x)
  i = 0
  while i < 1000
    x = (x + 7) & 0xffff
    i += 1
  end
  x
end

def outer(n)
  sum = 0
  n.times { |k| sum += leaf(k & 7) }
  sum
end

begun = Process.clock_gettime(Process::CLOCK_MONOTONIC)
outer(100) while Process.clock_gettime(Process::CLOCK_MONOTONIC) - begun < 2
