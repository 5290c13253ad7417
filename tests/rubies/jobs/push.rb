# Pushes jobs. Arguments: classes, each with a number of jobs: HardJob=10.
require_relative "app"

LONG = ["", "SECRETLONG" * 150, "SECRETLONG" * 410, "\\\",\"class\":\"SECRET\"" * 2000].freeze

TRACE = {}

# As the instrumentation of OpenTelemetry does it (`OpenTelemetry.propagation.inject(job)`).
class Injects
  def call(_class, job, _queue, _pool)
    job["traceparent"] = TRACE[:value] if TRACE[:value]
    job["tracestate"] = "SECRET=STATE" if TRACE[:value]
    yield
  end
end

Sidekiq.configure_client { |config| config.client_middleware { |chain| chain.add Injects } }

def traceparent(number)
  id, span = rand(1..(1 << 128) - 1), rand(1..(1 << 64) - 1)
  good = format("00-%032x-%016x-%02x", id, span, number % 2)
  case number % 6
  when 2 then good.upcase.tr("0-9", "A")
  when 3 then nil
  when 5 then "01#{good[2..]}-SECRET"
  else good
  end
end

ARGV.each do |argument|
  name, count = argument.split("=")
  job = Object.const_get(name)
  job = job.set(queue: "low") if name.start_with?("Shop::")
  count.to_i.times do |number|
    TRACE[:value] = traceparent(number)
    wrong = { "class" => "SECRETCLASS", "jid" => "SECRETJID", "traceparent" => traceparent(0) }
    job.perform_async("SECRETARG", wrong, LONG[number % LONG.size])
  end
end
