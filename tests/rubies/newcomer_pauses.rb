# A shop whose longest pauses are triggered by the lines of large orders. The kept objects make each collection long.
class Order
  def lines(count)
    (1..count).map { |n| "line #{n}" * 4 } # triggers
  end

  def render
    30.times.map { lines(4_000) }.size
  end
end

kept = Array.new(400_000) { |n| [n] }
order = Order.new
$stdout.sync = true
puts "ready #{kept.size}"
loop do
  10.times { order.lines(50) }
  order.render
  sleep 0.01
end
