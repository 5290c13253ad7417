# Logs its own truth: a line "NAME NATIVE_TID BEGIN_NS END_NS METHOD STATUS TRACEPARENT" per request to the file in GCTRACE_TEST_TRUTH.
# Requests also talk over Unix sockets that are none of the server's, in words that look like HTTP: to the Redis at GCTRACE_TEST_REDIS, and
# with a socket of this application's own.
require "socket"

TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)
OWN = "#{ENV.fetch("GCTRACE_TEST_TRUTH")}.own.#{Process.pid}"
BODY = "SECRETBODY" * 3
now = -> { Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond) }
tid = -> { File.readlink("/proc/thread-self")[/\d+\z/].to_i }
mutex = Mutex.new
own = nil

redis = lambda do
  UNIXSocket.open(ENV.fetch("GCTRACE_TEST_REDIS")) do |socket|
    socket.write("HTTP/1.1 599 None\r\n")
    raise "no error" unless socket.gets.start_with?("-ERR")
    socket.write("PING\r\n")
    raise "no answer" unless socket.gets == "+PONG\r\n"
  end
end

# Both sides in this thread: a connection is accepted that is none of the server's.
accepts = lambda do
  mutex.synchronize do
    own ||= UNIXServer.new(OWN)
    client = UNIXSocket.new(OWN)
    accepted = own.accept
    accepted.write("HTTP/1.1 599 None\r\n\r\n")
    raise "no answer" unless client.gets == "HTTP/1.1 599 None\r\n"
    [accepted, client].each(&:close)
  end
end

# A body that comes in pieces.
class Pieces
  def each
    3.times do
      sleep 0.01
      "x" * 1000
      yield "SECRETBODY"
    end
  end
end

# Connections that were handed over are answered, and closed, by another thread.
handed_over = Thread::Queue.new
Thread.new do
  while (io = handed_over.pop)
    sleep 0.02
    io.write("HTTP/1.1 200 OK\r\nContent-Length: #{BODY.size}\r\n\r\n#{BODY}")
    io.close
  end
end

run lambda { |env|
  native = tid.call
  begin_ns = now.call
  kind, name = env["PATH_INFO"].split("/").last(2)
  body = env["rack.input"]&.read
  status = body && !body.empty? ? 201 : 200
  answer = [BODY]
  log = lambda do
    trace = env["HTTP_TRACEPARENT"] || "-"
    TRUTH.syswrite("#{name} #{native} #{begin_ns} #{now.call} #{env["REQUEST_METHOD"]} #{status} #{trace}\n")
  end
  case kind
  when "gc" then GC.start
  when "lazy" then 20_000.times { "x" * 100 }
  when "slow" then sleep 0.03
  when "missing" then status = 404
  when "redis" then redis.call
  when "accepts" then accepts.call
  when "locals"
    # As Puma does around this.
    4.times { |i| Thread.current[:mark] = i.even? }
    mutex.synchronize { Thread.current[:mark] = true }
    GC.start
    Thread.current[:mark] = false
  when "hints"
    env["rack.early_hints"]&.call("link" => "</a>; rel=preload")
    sleep 0.03
  when "pieces" then answer = Pieces.new
  when "raise"
    status = 500
    log.call
    raise "no answer"
  when "handed"
    log.call
    handed_over << env["rack.hijack"].call
    next [-1, {}, []]
  when "hijack"
    log.call
    io = env["rack.hijack"].call
    io.write("HTTP/1.1 200 OK\r\nContent-Length: #{BODY.size}\r\n\r\n#{BODY}")
    io.close
    next [-1, {}, []]
  end
  log.call
  [status, { "content-type" => "text/plain", "set-cookie" => "a=SECRETCOOKIE" }, answer]
}
