# A thread that sleeps for as long as the program lives; the main thread says so and waits for a line.
require_relative "support"

def forever
  sleep
end

Report.run do |_extra|
  # Sleeps that began before gctrace saw the process are not seen.
  sleep 0.5
  thread = Thread.new { forever }
  sleep 0.01 until thread.status == "sleep"
  # Until it is off its CPU.
  sleep 0.2
  $stdout.puts "asleep"
  $stdout.flush
  $stdin.gets
end
