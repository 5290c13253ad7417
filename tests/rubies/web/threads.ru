# For a server with threads: requests that compute, and requests that wait.
run lambda { |env|
  if env["PATH_INFO"] == "/cpu"
    sum = 0
    20_000.times { |i| sum += i }
  else
    sleep 0.005
    sum = 0
  end
  [200, { "Content-Type" => "text/plain" }, [sum.to_s]]
}
