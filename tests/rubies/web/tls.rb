# `certificate KEY CERT` makes a key and a certificate for them; `get PORT PATH...` asks for the paths on one connection, and prints what was read.
require "openssl"
require "socket"

case ARGV.shift
when "certificate"
  key = OpenSSL::PKey::RSA.new(2048)
  certificate = OpenSSL::X509::Certificate.new
  certificate.version = 2
  certificate.serial = 1
  certificate.subject = certificate.issuer = OpenSSL::X509::Name.parse("/CN=localhost")
  certificate.public_key = key.public_key
  certificate.not_before = Time.now - 60
  certificate.not_after = Time.now + 86_400
  certificate.sign(key, OpenSSL::Digest.new("SHA256"))
  File.write(ARGV[0], key.to_pem)
  File.write(ARGV[1], certificate.to_pem)
when "get"
  context = OpenSSL::SSL::SSLContext.new
  context.verify_mode = OpenSSL::SSL::VERIFY_NONE
  stream = OpenSSL::SSL::SSLSocket.new(TCPSocket.new("127.0.0.1", Integer(ARGV.shift)), context)
  stream.connect
  ARGV.each_with_index do |path, at|
    close = at == ARGV.size - 1 ? "Connection: close\r\n" : ""
    stream.write("GET #{path} HTTP/1.1\r\nHost: x\r\n#{close}\r\n")
    text = +""
    # The empty chunk.
    text << stream.readpartial(4096) until text.end_with?("\r\n0\r\n\r\n")
    puts text
  end
end
