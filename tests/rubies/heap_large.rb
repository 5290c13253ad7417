# Makes the given number of objects, and then does nothing.
require_relative "support"

KEPT = Array.new(Integer(ARGV.fetch(0))) { |i| "kept #{i}" }
$stdout.puts "running"
$stdout.flush
$stdin.gets
