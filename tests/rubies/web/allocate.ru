# Allocates as many objects as the path asks for.
COUNTS = { "none" => 0, "some" => 20_000, "much" => 200_000 }.freeze

run lambda { |env|
  COUNTS.fetch(env["PATH_INFO"].split("/")[1]).times { Object.new }
  [200, { "content-type" => "text/plain" }, ["OK"]]
}
