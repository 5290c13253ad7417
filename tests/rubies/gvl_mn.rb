# Threads or Ractors that move from one native thread to another, if the Ruby supports that (RUBY_MN_THREADS=1).
def work(rounds)
  sum = 0
  rounds.times do |i|
    sum = (sum * 31 + i.to_s.sum) % 1_000_000_007
    sleep 0.0005 if (i % 500).zero?
  end
  sum
end

Warning[:experimental] = false if Warning.respond_to?(:[]=)
values =
  case ARGV.fetch(0)
  when "threads" then Array.new(6) { Thread.new { work(20_000) } }.map(&:value)
  when "ractors" then Array.new(4) { Ractor.new { work(20_000) } }.map { |r| r.respond_to?(:value) ? r.value : r.take }
  end
puts "values #{values.uniq.inspect}"
$stdout.flush
# CRuby 3.3 itself crashes at times, traced or not, when it frees a VM whose native threads are still ending.
exit!(true)
