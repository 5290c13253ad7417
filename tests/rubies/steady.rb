# Collects garbage without end; "stop" on its standard input makes it print a checksum and exit with status 7. With the
# argument "lazy" it leaves all collections to the VM, and is in the middle of one at almost any time; with "slow" it collects
# some dozen times a second.
require_relative "support"

stop = false
reader = Thread.new do
  $stdin.each_line { |line| break if line.strip == "stop" }
  stop = true
end
Report.run(wait: false) do |extra|
  $stdout.puts "ready"
  $stdout.flush
  kept = []
  rounds = 0
  until stop
    Work.small(5_000)
    Work.keep(kept, 300)
    kept = kept.last(2_000)
    kept.first.other = nil
    rounds += 1
    next Thread.pass if ARGV[0] == "lazy"

    GC.start(full_mark: (rounds % 4).zero?) if (rounds % 3).zero?
    sleep(ARGV[0] == "slow" ? 0.02 : 0.001)
  end
  extra["rounds"] = rounds
end
reader.join
puts "checksum #{Work.checksum(20_000)}"
exit 7
