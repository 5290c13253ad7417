# A program for web servers: each request makes garbage. The hooks below say when a worker begins and ends, and how many
# collections it counts then.
run lambda { |_env|
  kept = Array.new(200) { |i| i.to_s * 20 }
  3_000.times { |i| [i, i.to_s] }
  [200, { "Content-Type" => "text/plain" }, [kept.size.to_s]]
}
