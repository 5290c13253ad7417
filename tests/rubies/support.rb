# What every test script shares: it runs its work between two readings of its own GC.stat, with the witness (if one is
# given) logging in between, and writes what it saw as JSON. Set by the harness:
#   GCTRACE_TEST_WITNESS  path of the witness extension     GCTRACE_TEST_LOG     where the witness writes its log
#   GCTRACE_TEST_REPORT   where the report goes             GCTRACE_TEST_WAIT    print "ready", wait for a line
# A child or a successor of the script appends a suffix to both output paths.
require "json"

if (extension = ENV["GCTRACE_TEST_WITNESS"])
  require extension
end

module Report
  module_function

  # Runs the block, which may fill the hash that it receives, and writes the report and the witness's log.
  def run(suffix = "", wait: ENV.key?("GCTRACE_TEST_WAIT"))
    before = {}
    after = {}
    GC.stat(before)
    GC.stat(after)
    extra = {}
    if wait
      $stdout.puts "ready"
      $stdout.flush
      $stdin.gets
    end
    # Both hashes hold all keys already, so nothing is allocated between the witness and the reading next to it.
    Witness.start if defined?(Witness)
    GC.stat(before)
    yield extra
    GC.stat(after)
    Witness.stop if defined?(Witness)
    write(suffix, before, after, extra)
  end

  def write(suffix, before, after, extra)
    report = {
      "pid" => Process.pid, "ppid" => Process.ppid, "ruby" => RUBY_VERSION, "argv0" => $0,
      "opts" => GC::OPTS, "constants" => GC::INTERNAL_CONSTANTS, "before" => before, "after" => after, "extra" => extra
    }
    Witness.dump(ENV.fetch("GCTRACE_TEST_LOG") + suffix) if defined?(Witness)
    if (path = ENV["GCTRACE_TEST_REPORT"])
      File.write("#{path}#{suffix}.part", JSON.generate(report))
      File.rename("#{path}#{suffix}.part", path + suffix)
    else
      puts JSON.pretty_generate(report)
    end
  end
end

module Host
  module_function

  # Time that a hypervisor has taken from this machine's CPUs, nanoseconds since it booted, in ticks (proc(5)).
  def stolen_ns
    File.read("/proc/stat")[/^cpu .*/].split[8].to_i * 10_000_000
  end

  # The peak of this process's resident memory (VmHWM), KiB; nil where there is no /proc.
  def peak_rss_kib
    File.read("/proc/self/status")[/^VmHWM:\s*(\d+)/, 1].to_i
  rescue Errno::ENOENT
    nil
  end
end

# Garbage of several kinds, in amounts that depend only on the arguments.
module Work
  module_function

  class Node
    def initialize(number, other)
      @number = number
      @other = other
    end
    attr_accessor :other
  end

  # Small objects that die young: minor collections by newobj.
  def small(count)
    i = 0
    while i < count
      [i, i.to_s]
      i += 1
    end
  end

  # Few objects with large buffers: collections by malloc.
  def large(count, bytes = 1 << 20)
    i = 0
    while i < count
      "x" * bytes
      i += 1
    end
  end

  # Objects that stay: old generations grow, major collections follow.
  def keep(list, count)
    previous = list.last
    count.times do |i|
      previous = Node.new(i, previous)
      list << previous
      Array.new(3) { i }
    end
    list
  end

  # A number that only comes out right if the program ran undisturbed.
  def checksum(rounds)
    sum = 0
    rounds.times { |i| sum = (sum * 31 + i.to_s.sum) % 1_000_000_007 }
    sum
  end
end
