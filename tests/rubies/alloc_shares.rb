# Allocates in three methods, in shares that it reports. The order is random, so that heap pages do not end at the same point
# again and again. The last method runs in its own thread.
require_relative "support"

class Shop
  def most; Object.new; end
  def some; Object.new; end
  def few; Object.new; end
end

CALLS = 6_000_000
random = Random.new(42)
shop = Shop.new
order = ([:most] * 7_000 + [:some] * 3_000).shuffle(random: random)
Report.run do |extra|
  helper = Thread.new do
    Thread.current.name = "helper"
    (CALLS / 10).times { shop.few }
  end
  calls = CALLS * 9 / 10
  (calls / order.size).times { order.each { |name| shop.__send__(name) } }
  helper.join
  extra.update("most" => calls * 7 / 10, "some" => calls * 3 / 10, "few" => CALLS / 10)
end
