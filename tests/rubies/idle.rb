# Does nothing at all until it is told to end.
require_relative "support"

GC.disable
Report.run { |extra| extra["idle"] = true }
$stdout.puts "idle"
$stdout.flush
$stdin.gets
