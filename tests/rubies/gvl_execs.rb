# Children that release the GVL, and become another Ruby before they have collected: two soon, one after it was noticed. Each reports how long
# it lived, and ends long before this program does.
require_relative "support"
require "rbconfig"

def now
  Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
end

Report.run do |extra|
  extra["children"] = [0.01, 0.01, 2.5].map do |nap|
    begun = now
    pid = fork do
      sleep nap
      exec RbConfig.ruby, "--disable=gems", "-e", "GC.start; sleep 0.1; GC.start"
    end
    Process.wait(pid)
    raise "it failed: #{$?}" unless $?.success?
    { "pid" => pid, "lived_ns" => now - begun }
  end
  sleep 2
end
