# Grows by a requested number of objects, line by line; nothing else in it is called Order.
require_relative "support"

class Order; end
ORDERS = []

$stdout.sync = true
Report.run do
  $stdout.puts "ready"
  while (line = $stdin.gets) && line != "end\n"
    Integer(line).times { ORDERS << Order.new }
    $stdout.puts "grown"
  end
end
