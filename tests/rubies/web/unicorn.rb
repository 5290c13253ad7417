require_relative "counts"
worker_processes 2
preload_app true
after_fork do |_server, _worker|
  Counts.say("begin")
  pid = Process.pid
  at_exit { Counts.say("end") if Process.pid == pid }
end
