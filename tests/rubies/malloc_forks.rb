# A process and a child of it that both allocate known amounts through CRuby's allocation functions when the parent gets a line: the child
# first, which then ends with its memory, then the parent, then a second child that is forked meanwhile. Sizes are of classes that a
# small script uses for nothing else. With the line "churn" the parent makes many calls and the child few, and both stay.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_MALLOC_WITNESS")
$stdout.sync = true

MIB = 1 << 20

Report.run do |extra|
  GC.start
  GC.disable
  read, write = IO.pipe
  child = fork do
    write.close
    order = read.gets
    MallocWitness.calloc(5 * MIB, 15)
    read.gets if order == "churn\n"
    exit!(0)
  end
  read.close
  extra["child"] = child
  puts "counting"
  order = $stdin.gets
  write.syswrite(order)
  if order == "churn\n"
    MallocWitness.churn(48, 400_000)
  else
    Process.wait(child)
    MallocWitness.malloc(3 * MIB, 20)
    MallocWitness.free
    MallocWitness.malloc2(2, 10 * MIB, 7)
    later = fork do
      MallocWitness.malloc(3 * MIB, 50)
      MallocWitness.free
      exit!(0)
    end
    Process.wait(later)
  end
  puts "counted"
  $stdin.gets
  write.close
  Process.wait(child) if order == "churn\n"
end
