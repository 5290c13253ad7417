# As many objects as are given, and then nothing happens.
require_relative "support"

KEPT = Array.new(Integer(ARGV.fetch(0))) { |i| "kept #{i}" }
$stdout.puts "running"
$stdout.flush
$stdin.gets
