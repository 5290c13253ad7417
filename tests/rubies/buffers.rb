# A large buffer right after each collection, freed before the next one: if the memory of a collection is read too late,
# the buffer is in it.
require_relative "support"

BYTES = 34 << 20
rounds = Integer(ARGV[0] || 200)
Report.run do |extra|
  extra["buffer"] = BYTES
  extra["before"] = Integer(File.read("/proc/self/status")[/^VmRSS:\s*(\d+)/, 1]) * 1024
  rounds.times do
    GC.start
    buffer = "x" * BYTES
    buffer.clear
  end
end
