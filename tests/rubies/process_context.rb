# Publishes a process context as an OpenTelemetry SDK does (OTEP 4719), with the names and values in its arguments (`key=value`), and
# collects garbage until it is told to `end`. Another line `key=value ...` on standard input replaces the context.
require "fiddle"

module Context
  LIBC = Fiddle.dlopen(nil)
  WORD, LONG, INT = Fiddle::TYPE_VOIDP, Fiddle::TYPE_LONG, Fiddle::TYPE_INT
  call = ->(name, arguments, result) { Fiddle::Function.new(LIBC[name], arguments, result) }
  MEMFD = call["memfd_create", [WORD, INT], INT]
  TRUNCATE = call["ftruncate", [INT, LONG], INT]
  MMAP = call["mmap", [WORD, LONG, INT, INT, INT, LONG], WORD]
  MADVISE = call["madvise", [WORD, LONG, INT], INT]

  # A message of protobuf: fields of bytes only.
  def self.field(number, bytes)
    length, size = [], bytes.bytesize
    loop { length << (size & 127 | (size > 127 ? 128 : 0)); break if (size >>= 7).zero? }
    [number << 3 | 2, *length].pack("C*") + bytes.b
  end

  def self.payload(pairs)
    attributes = pairs.map do |pair|
      key, value = pair.split("=", 2)
      field(1, field(1, key) + field(2, field(1, value)))
    end
    field(1, attributes.join)
  end

  # MAP_PRIVATE of a memfd, which is closed; MADV_DONTFORK.
  def self.map
    fd = MEMFD.call("OTEL_CTX", 3)
    raise "memfd_create" if fd.negative? || TRUNCATE.call(fd, 4096).nonzero?
    at = MMAP.call(nil, 4096, 3, 2, fd, 0)
    IO.for_fd(fd).close
    raise "madvise" if MADVISE.call(at, 4096, 10).nonzero?
    @header = Fiddle::Pointer.new(at.to_i, 4096)
  end

  def self.publish(pairs)
    map unless @header
    @header[16, 8] = [0].pack("Q")
    @payload = Fiddle::Pointer[payload(pairs)]
    @header[0, 16] = ["OTEL_CTX", 2, @payload.size].pack("a8LL")
    @header[24, 8] = [@payload.to_i].pack("Q")
    @header[16, 8] = [Process.clock_gettime(Process::CLOCK_BOOTTIME, :nanosecond)].pack("Q")
  end
end

$stdout.sync = true
Context.publish(ARGV)
own = Process.pid
child = fork do
  while Process.ppid == own
    GC.start
    sleep 0.01
  end
end
puts "published #{child}"
collecting = Thread.new { loop { GC.start; sleep 0.01 } }
while (line = $stdin.gets.to_s.chomp) != "end" && !line.empty?
  Context.publish(line.split)
  puts "published"
end
collecting.kill
