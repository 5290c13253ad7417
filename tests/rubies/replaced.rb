# Collects, becomes another program when it is told to, and waits as that one.
require_relative "support"
require "rbconfig"

$stdout.sync = true

unless ARGV.first == "again"
  Thread.new do
    loop do
      GC.start
      sleep 0.05
    end
  end
  puts "ready"
  $stdin.gets
  exec RbConfig.ruby, "--disable=gems", File.expand_path(__FILE__), "again"
end

Report.run do
  puts "replaced"
  $stdin.gets
end
