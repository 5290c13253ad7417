# Logs its own truth: a line "NAME HEADER" per request to the file in GCTRACE_TEST_TRUTH, with the header traceparent as the application
# sees it, in quotes, or "nil". Each request computes and collects.
TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)

def work
  till = Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) + 0.008
  list = []
  list = Array.new(200) { |i| "text #{i}" } while Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) < till
  GC.start(full_mark: false)
  list.size
end

run lambda { |env|
  env["rack.input"]&.read
  work
  TRUTH.syswrite("#{env["PATH_INFO"].split("/").last} #{env["HTTP_TRACEPARENT"].inspect}\n")
  [200, { "content-type" => "text/plain" }, ["OK"]]
}
