require_relative "counts"
worker_processes 2
preload_app true
after_fork do |_server, _worker|
  Counts.begin
  pid = Process.pid
  at_exit { Counts.end if Process.pid == pid }
end
