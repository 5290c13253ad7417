# The TuneMyGC agent's side of the protocol, as documented: registers, sends sets over net/http and handles each
# answer as the agent does. Prints the result as one JSON object.
#   tunemygc_agent.rb certificate DIR          writes an authority, a certificate of 127.0.0.1 and its key
#   tunemygc_agent.rb agent URL SET [CA]       the exchange with a collector, https:// if its authority is given
#   tunemygc_agent.rb send URL TOKEN SET       one set, with this token
require "json"
require "net/http"
require "openssl"

def certificate(dir)
  make = lambda do |name, key, issuer, issuer_key, extensions|
    cert = OpenSSL::X509::Certificate.new
    cert.version = 2
    cert.serial = OpenSSL::BN.rand(64)
    cert.subject = OpenSSL::X509::Name.parse("/CN=#{name}")
    cert.issuer = issuer ? issuer.subject : cert.subject
    cert.public_key = key
    cert.not_before = Time.now - 3600
    cert.not_after = Time.now + 3600
    factory = OpenSSL::X509::ExtensionFactory.new(issuer || cert, cert)
    extensions.each { |name, value, critical| cert.add_extension(factory.create_extension(name, value, critical)) }
    cert.sign(issuer_key || key, OpenSSL::Digest.new("SHA256"))
  end
  authority_key = OpenSSL::PKey::EC.generate("prime256v1")
  authority = make.call("test authority", authority_key, nil, nil,
                        [["basicConstraints", "CA:TRUE", true], ["keyUsage", "keyCertSign", true]])
  key = OpenSSL::PKey::EC.generate("prime256v1")
  cert = make.call("127.0.0.1", key, authority, authority_key,
                   [["basicConstraints", "CA:FALSE", true], ["subjectAltName", "IP:127.0.0.1", false],
                    ["extendedKeyUsage", "serverAuth", false]])
  File.write(File.join(dir, "ca.pem"), authority.to_pem)
  File.write(File.join(dir, "chain.pem"), cert.to_pem + authority.to_pem)
  File.write(File.join(dir, "key.pem"), key.to_pem)
end

class Agent
  def initialize(url, ca)
    @uri = URI(url)
    @ca = ca
  end

  def http
    client = Net::HTTP.new(@uri.host, @uri.port)
    client.open_timeout = client.read_timeout = 30
    if @uri.scheme == "https"
      client.use_ssl = true
      client.verify_mode = OpenSSL::SSL::VERIFY_PEER
      client.ca_file = @ca
    end
    client
  end

  def register
    request = Net::HTTP::Post.new("/accounts")
    request.set_form_data("email" => "someone@example.com", "app" => "shop")
    answer = http.request(request)
    answer.is_a?(Net::HTTPSuccess) ? answer.body : raise("not registered: #{answer.code} #{answer.body}")
  end

  # The agent's handling of a set. It retries after a 500 or no answer, three attempts in all.
  def sync(set, pause: 0.1)
    tries = 0
    begin
      tries += 1
      request = Net::HTTP::Post.new("/ruby", "Content-Type" => "application/json", "Accept" => "application/json",
                                             "User-Agent" => "TuneMyGC 1.0.71")
      request.body = JSON.generate(set)
      answer = http.request(request)
      raise IOError, answer.body if answer.code == "500"
      [answer.code.to_i, word(answer), tries]
    rescue IOError, SystemCallError, Timeout::Error => error
      if tries < 3
        sleep pause * tries
        retry
      end
      [500, "Sync failed after retries: #{error.message}", tries]
    end
  end

  def word(answer)
    case answer.code
    when "200" then "Please visit #{answer.body.gsub(/\.json$/, "")}"
    when "404" then "Invalid application token"
    when "501" then "Ruby version or Rails version not supported"
    when "426" then "Agent version #{answer.body} required"
    when "412" then "already tuned by environment variables (#{JSON.parse(answer.body).keys.join(",")})"
    when "400" then "Invalid payload (#{answer.body})"
    else "Unknown error: #{answer.body}"
    end
  end

  def get(path)
    answer = http.request(Net::HTTP::Get.new(path))
    [answer.code.to_i, answer.body]
  end
end

case ARGV.shift
when "certificate"
  certificate(ARGV.fetch(0))
when "send"
  url, token, path = ARGV
  set = JSON.parse(File.read(path))
  set[0][0] = token
  puts JSON.generate(Agent.new(url, nil).sync(set))
when "agent"
  url, path, ca = ARGV
  agent = Agent.new(url, ca)
  token = agent.register
  set = JSON.parse(File.read(path))
  # The header as the agent really sends it: twelve elements, among them its own variables.
  header = set[0]
  header[0] = token
  header[3] = { "RUBY_GC_TOKEN" => token, "RUBY_GC_TUNE_HOST" => url, "RUBY_GC_SPY" => "manual", "RUBY_GC_TUNE" => "200" }
  header[4] = "1.0.71"
  header.insert(8, "manual")
  changed = lambda do |&change|
    copy = Marshal.load(Marshal.dump(set))
    change.call(copy)
    agent.sync(copy)
  end
  result = { "token" => token, "apps" => agent.get("/apps/#{token}"), "unknown" => agent.get("/apps/#{"0" * 32}") }
  result["codes"] = {
    "200" => agent.sync(set),
    "again" => agent.sync(set),
    "404" => changed.call { |set| set[0][0] = "0" * 32 },
    "501" => changed.call { |set| set[0][1] = "1.9.3" },
    "426" => changed.call { |set| set[0][4] = "1.0.2" },
    "400" => changed.call { |set| set[1][0] = "soon" },
  }
  config = result["codes"]["200"][1][%r{/configs/\h+}]
  result["config"] = agent.get(config)
  result["json"] = agent.get("#{config}.json")
  puts JSON.generate(result)
end
