# Pushes jobs. Arguments: classes, each with a number of jobs: HardJob=10.
require_relative "app"

LONG = ["", "SECRETLONG" * 150, "SECRETLONG" * 410, "\\\",\"class\":\"SECRET\"" * 2000].freeze

ARGV.each do |argument|
  name, count = argument.split("=")
  job = Object.const_get(name)
  job = job.set(queue: "low") if name.start_with?("Shop::")
  count.to_i.times do |number|
    job.perform_async("SECRETARG", { "class" => "SECRETCLASS", "jid" => "SECRETJID" }, LONG[number % LONG.size])
  end
end
