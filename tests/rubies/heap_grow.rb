# Grows by a number of objects that is asked for, line by line, and by nothing else that is called Order.
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
