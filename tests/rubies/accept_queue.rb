# Listens, has a child that shares the socket, and accepts nobody. Prints its port and the pid of the child.
require "socket"

$stdout.sync = true
server = TCPServer.new("127.0.0.1", 0)
ends, never_written = IO.pipe
child = fork do
  never_written.close
  GC.start
  # Until its parent ends.
  ends.read
end
GC.start
puts "#{server.addr[1]} #{child}"
sleep
