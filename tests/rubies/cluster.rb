# A master with two workers, one of which has a title; on a line of input it forks a third one, which starts another Ruby. Each
# prints its pid and what GC.count was before and after it collected.
$stdout.sync = true

def work
  first = GC.count
  5.times { GC.start; Array.new(10_000) { |i| i.to_s } }
  puts "done #{Process.pid} #{first} #{GC.count}"
end

if ARGV[0] == "started"
  work
  exit
end

pipes = Array.new(2) { IO.pipe }
workers = pipes.each_with_index.map do |(read, write), number|
  fork do
    pipes.each { |_, other| other.close }
    $0 = "renamed: worker 1 [x]" if number == 1
    read.gets
    work
  end
end
puts "ready #{workers.join(" ")}"
$stdin.gets
pipes.each { |_, write| write.puts "go"; write.close }
later = fork do
  work
  # A Ruby that another program starts, by an exec.
  system(RbConfig.ruby, __FILE__, "started", exception: true)
end
work
[*workers, later].each { |pid| Process.wait(pid) }
exit
