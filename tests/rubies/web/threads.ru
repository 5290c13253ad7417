# For a server with threads: requests that compute, requests that do nothing, and requests that wait.
run lambda { |env|
  sum = 0
  case env["PATH_INFO"]
  when "/cpu" then 20_000.times { |i| sum += i }
  when "/hello" then nil
  else sleep 0.005
  end
  [200, { "Content-Type" => "text/plain" }, [sum.to_s]]
}
