# Listens on TCP and is no HTTP server: it answers each line with another one, whatever the line is.
require "socket"

server = TCPServer.new("127.0.0.1", Integer(ARGV.fetch(0)))
loop do
  Thread.new(server.accept) do |client|
    while (line = client.gets)
      client.write("HTTP/1.1 200 #{line}")
    end
    client.close
  end
end
