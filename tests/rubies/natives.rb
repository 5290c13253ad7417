# Spends its CPU time in libraries: what is above each C function in a native stack is known.
require_relative "support"
require "zlib"

CPU = Process.clock_getres(Process::CLOCK_THREAD_CPUTIME_ID) && Process::CLOCK_THREAD_CPUTIME_ID
BYTES = (0...60_000).map { |i| ((i * i) >> 5) & 0xff }.pack("C*")

def cpu
  Process.clock_gettime(CPU, :nanosecond)
end

# zlib's function, called by the extension, without a call back.
def compressing
  Zlib::Deflate.deflate(BYTES, 9)
end

# A class without a name. It lives as long as its methods' names are asked for: those of a class that is collected before are not known.
SINKS = [
  Class.new do
    def initialize; @written = 0; end
    def write(*texts)
      Zlib.crc32(BYTES * 20)
      texts.sum(&:bytesize)
    end
  end
].freeze

# The extension calls back: its frames are between those of Ruby.
def opening
  gz = Zlib::GzipWriter.new(SINKS[0].new)
  gz.write("x")
  gz.finish
end

# The tables of a process are made when it is first seen, which takes as long as it takes. With a large text nearly all of the time is in
# the library, so that the extension is seen only by its caller's place in the stack.
LARGE = BYTES * 20
def warming
  Zlib.crc32(LARGE)
end

Report.run do |_extra|
  $stdout.puts "warming"
  $stdout.flush
  warming until IO.select([$stdin], nil, nil, 0)
  $stdin.gets
  %i[compressing opening].each do |part|
    till = cpu + 800_000_000
    send(part) while cpu < till
  end
end
