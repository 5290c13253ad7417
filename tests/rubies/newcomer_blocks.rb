# A server whose threads answer at once, if an import did not keep the GVL.
module Importer
  def self.parse(rows)
    rows.sum { |row| row.hash % 7 }
  end
end

Thread.new do
  Thread.current.name = "importer"
  rows = (1..200_000).to_a
  loop { Importer.parse(rows) }
end
3.times do |number|
  Thread.new do
    Thread.current.name = "web #{number}"
    loop { sleep 0.005 }
  end
end
$stdout.sync = true
puts "ready"
sleep
