# Answers in parts, and logs its own truth: a line "NAME NATIVE_TID BEGIN_NS FIRST_NS LAST_NS CLOSED_NS" per request to the file in
# GCTRACE_TEST_TRUTH: when the application was called, when it handed out the first and the last part, and when the body was closed.
TRUTH = File.open(ENV.fetch("GCTRACE_TEST_TRUTH"), File::WRONLY | File::APPEND | File::CREAT)

# A body of as many parts as are asked for.
class Parts
  def initialize(name, count)
    @name, @count = name, count
    @begin_ns = now
    # Thread#native_thread_id exists since 3.1; before, the thread's own link in /proc tells.
    @native = File.readlink("/proc/thread-self")[/\d+\z/]
  end

  def each
    @count.times do |at|
      sleep 0.02 if at > 0
      GC.start if at == 1
      @last_ns = now
      @first_ns ||= @last_ns
      yield "part #{at}\n"
    end
  end

  def close
    TRUTH.syswrite("#{[@name, @native, @begin_ns, @first_ns, @last_ns, now].join(" ")}\n")
  end

  private

  def now
    Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)
  end
end

run lambda { |env|
  _, kind, count, name = env["PATH_INFO"].split("/")
  # A number is a status.
  [kind[/\A\d+\z/]&.to_i || 200, { "content-type" => "text/plain" }, Parts.new(name, Integer(count))]
}
