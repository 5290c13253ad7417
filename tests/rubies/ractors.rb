# Ruby threads without their own native thread, or with different ones during their life: those of Ractors (from 3.3 on), and with
# RUBY_MN_THREADS=1 those of the main Ractor, too. Each does a known number of rounds of the same work in its own
# method, with a switch to another thread after each: the VM decides where they run.
require_relative "support"

ROUNDS = { "half" => 50, "third" => 30, "fifth" => 20 }.freeze

def round
  i = 0
  i += 1 while i < 1_000_000
  Thread.pass
end

def half(rounds)
  rounds.times { round }
end

def third(rounds)
  rounds.times { round }
end

def fifth(rounds)
  rounds.times { round }
end

Report.run do |extra|
  if ARGV.include?("ractors")
    ractors = ROUNDS.map { |name, rounds| Ractor.new(name, rounds) { |method, count| __send__(method, count) && nil } }
    ractors.each { |ractor| ractor.respond_to?(:value) ? ractor.value : ractor.take }
  else
    ROUNDS.map { |name, rounds| Thread.new { send(name, rounds) } }.each(&:join)
  end
  extra["rounds"] = ROUNDS
end
