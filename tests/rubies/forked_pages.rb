# A server that preforks: it makes objects and a large string, then forks three workers on a line of input. On the next line the first
# one writes to known pages of objects and of the string, the second one does nothing, the third one collects. No other GC runs.
require_relative "support"
require "objspace"
$stdout.sync = true

PAGE = 4096
KEPT = Array.new(300_000) { |i| "kept #{i}" }
BIG = "x" * (64 << 20)
BIG_PAGES = 4_000

# One string on each of many pages, by their addresses.
pages = {}
KEPT.each_slice(20) do |kept, *|
  address = Integer(ObjectSpace.dump(kept)[/"address": ?"0x(\h+)"/, 1], 16)
  pages[address / PAGE] ||= kept
end
CHOSEN = pages.values

Report.run do |extra|
  extra["object_pages"] = CHOSEN.size
  extra["big_pages"] = BIG_PAGES
  3.times { GC.start }
  GC.disable
  puts "loaded"
  $stdin.gets
  pipes = Array.new(3) { IO.pipe }
  done, finished = IO.pipe
  workers = pipes.each_with_index.map do |(read, write), number|
    fork do
      pipes.each { |_, other| other.close }
      read.gets
      case number
      when 0
        CHOSEN.each { |kept| kept.setbyte(0, 107) }
        at = 0
        while at < BIG_PAGES
          BIG.setbyte(at * PAGE, 120)
          at += 1
        end
      when 2
        GC.enable
        GC.start
      end
      finished.syswrite("x")
      read.gets
      exit!(0)
    end
  end
  extra["workers"] = workers
  puts "forked"
  $stdin.gets
  pipes.each { |_, write| write.syswrite("go\n") }
  3.times { done.sysread(1) }
  puts "written"
  $stdin.gets
  pipes.each { |_, write| write.close }
  workers.each { |pid| Process.wait(pid) }
end
