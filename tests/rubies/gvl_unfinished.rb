# Threads whose first wait for the GVL is long, and one whose wait is not over when tracing ends: another thread holds it in C code meanwhile.
require_relative "support"
require ENV.fetch("GCTRACE_TEST_GVL_WITNESS")

$stdout.puts "ready"
$stdout.flush
$stdin.gets
4.times do
  thread = Thread.new { nil }
  GvlWitness.hold(300)
  thread.join
end
late = Thread.new do
  Thread.current.name = "late"
  sleep 0.2
end
sleep 0.05
$stdout.puts "holding"
$stdout.flush
GvlWitness.hold(5_000)
late.join
