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

# CPU time: however long it takes, the program runs for longer than Ruby itself takes to start.
now = -> { Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID) }
begun = now.call
outer(100) while now.call - begun < 2
