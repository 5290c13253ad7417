# Logs its own truth: a line "NAME NATIVE_TID BEGIN_NS END_NS METHOD STATUS" per request to the file in GCTRACE_TEST_TRUTH.
TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)
now = -> { Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond) }
# SIGWINCH: another program in this process; the kernel closes all connections.
trap("WINCH") { exec("puma", *ENV.fetch("GCTRACE_TEST_ARGS").split("\n")) }
tids = {}
mutex = Mutex.new
# Thread#native_thread_id exists since 3.1; before, the thread's own link in /proc tells.
tid = lambda do
  key = Thread.current.object_id
  mutex.synchronize { tids[key] } || begin
    own = File.readlink("/proc/thread-self")[/\d+\z/].to_i
    mutex.synchronize { tids[key] = own }
  end
end

# Connections that were handed over are answered, and closed, by another thread.
handed_over = Thread::Queue.new
Thread.new do
  while (io = handed_over.pop)
    sleep 0.02
    body = "SECRETBODY" * 3
    io.write("HTTP/1.1 200 OK\r\nContent-Length: #{body.size}\r\n\r\n#{body}")
    io.close
  end
end

# More than a connection buffers.
FILE = "#{ENV.fetch("GCTRACE_TEST_TRUTH")}.file"
FILE_BYTES = 32 << 20
File.open(FILE, "w") { |file| file.truncate(FILE_BYTES) }

run lambda { |env|
  native = tid.call
  begin_ns = now.call
  kind, name = env["PATH_INFO"].split("/").last(2)
  body = env["rack.input"]&.read
  case kind
  when "gc" then GC.start
  when "lazy" then 20_000.times { "x" * 100 }
  when "slow" then sleep 0.03
  end
  status = kind == "missing" ? 404 : 200
  status = 201 if body && !body.empty?
  line = "#{name} #{native} #{begin_ns} #{now.call} #{env["REQUEST_METHOD"]} #{status}\n"
  if kind == "hijack"
    handed_over << env["rack.hijack"].call
    next [-1, {}, []]
  end
  TRUTH.syswrite(line)
  next [200, { "content-length" => FILE_BYTES.to_s }, File.open(FILE)] if kind == "file"
  [status, { "content-type" => "text/plain", "set-cookie" => "a=SECRETCOOKIE" }, ["SECRETBODY" * 3]]
}
