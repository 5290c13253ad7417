# A request to /hold is not answered before the file GCTRACE_TEST_TRUTH.go is there, one to /brief takes a while.
go = "#{ENV.fetch("GCTRACE_TEST_TRUTH")}.go"

run lambda { |env|
  case env["PATH_INFO"]
  when "/hold" then sleep 0.01 until File.exist?(go)
  when "/brief" then sleep 0.2
  end
  [200, { "content-type" => "text/plain" }, ["done"]]
}
