# A server whose titles overwrite its environment: `$0` of this length leaves nothing of it. It reads a line, sets its title, says so, reads
# another line, and forks a worker that collects. The worker's report has the suffix ".worker".
require_relative "support"

$stdout.sync = true
Report.run(wait: false) do
  puts "started"
  $stdin.gets
  $0 = "titled: #{"x" * 9000}"
  puts "titled"
  $stdin.gets
  pid = fork do
    $0 = "titled worker: #{"x" * 9000}"
    Report.run(".worker", wait: false) do |extra|
      extra["factor"] = ENV["RUBY_GC_HEAP_GROWTH_FACTOR"]
      Work.small(200_000)
      3.times { GC.start }
    end
  end
  Process.wait(pid)
  GC.start
end
