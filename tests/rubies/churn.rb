# Code that comes and goes: classes and methods are made from text, run in short-lived threads and fibers, and dropped,
# while another thread collects and compacts. Every method's name gives its class, its file and its line, so that
# any mix-up shows: `Churn17#m17` is in churn17.rb at line 18.
require_relative "support"

SECONDS = Float(ARGV.fetch(0, "5"))

def clock
  Process.clock_gettime(Process::CLOCK_MONOTONIC)
end

def build(number)
  text = "class Churn#{number}\n  def m#{number}(list)\n    i = 0\n    i += 1 while i < 30_000\n" \
         "    list.sort_by { |one| -one }\n    yield\n  end\nend\n"
  Object.class_eval(text, "churn#{number}.rb", number)
  Object.const_get("Churn#{number}")
end

Report.run do |extra|
  till = clock + SECONDS
  made = 0
  list = Array.new(300) { |i| i }
  collector = Thread.new do
    while clock < till
      GC.start
      GC.compact if GC.respond_to?(:compact) && RUBY_PLATFORM.include?("linux")
      ObjectSpace.garbage_collect
      sleep 0.002
    end
  end
  makers = 3.times.map do |maker|
    Thread.new do
      while clock < till
        number = (made += 1) * 3 + maker
        type = build(number)
        method = :"m#{number}"
        thread = Thread.new { type.new.public_send(method, list) { Fiber.new { type.new.public_send(method, list) {} }.resume } }
        number % 5 == 0 ? thread.kill : thread.join
        thread.join
        Object.send(:remove_const, type.name)
      end
    end
  end
  (makers + [collector]).each(&:join)
  extra["made"] = made
end
