# Heaps that change all the time: objects come and go, in the way that is named.
require_relative "support"

mode = ARGV.fetch(0)
KEPT = []

def churn(rounds)
  rounds.times do |i|
    KEPT << Array.new(20) { |n| "#{i} #{n}" }
    KEPT.shift if KEPT.size > 2_000
    Struct.new(:one).new(i) if i % 500 == 0
  end
end

churn(3_000)
case mode
when "stress" then GC.stress = true
when "compact"
  begin
    GC.auto_compact = true
  rescue NotImplementedError, NoMethodError
    nil
  end
when "ractors"
  if defined?(Ractor)
    Warning[:experimental] = false
    Array.new(2) { Ractor.new { loop { Array.new(100) { |n| "of a ractor #{n}" } } } }
  end
end
$stdout.puts "ready"
$stdout.flush
loop do
  churn(mode == "stress" ? 2 : 500)
  GC.compact if mode == "compact" && GC.respond_to?(:compact)
end
