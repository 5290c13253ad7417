# A WEBrick that serves the application of the first argument, such as requests.ru, on the port of the second.
require "webrick"

class Builder
  def self.load(path)
    new.tap { |builder| builder.instance_eval(File.read(path), path) }.app
  end

  attr_reader :app

  def run(app)
    @app = app
  end
end

APP = Builder.load(ARGV.fetch(0))

class Application < WEBrick::HTTPServlet::AbstractServlet
  def service(request, response)
    env = { "PATH_INFO" => request.path, "REQUEST_METHOD" => request.request_method }
    trace = request["traceparent"]
    env["HTTP_TRACEPARENT"] = trace if trace
    env["rack.input"] = StringIO.new(request.body) if request.body
    status, headers, body = APP.call(env)
    response.status = status
    headers.each { |name, value| response[name] = value }
    response.body = body.join
  end
end

server = WEBrick::HTTPServer.new(
  BindAddress: "127.0.0.1", Port: Integer(ARGV.fetch(1)), AccessLog: [], Logger: WEBrick::Log.new(File::NULL)
)
server.mount("/", Application)
trap("TERM") { server.shutdown }
server.start
