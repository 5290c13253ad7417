# Collects garbage, then replaces itself by another Ruby program, which reports with the suffix ".after". With the argument "thread"
# another thread than the main one does that.
require_relative "support"

if ARGV[0] == "after"
  Report.run(".after", wait: false) do
    5.times { Work.small(30_000); GC.start }
  end
else
  Report.run do
    3.times { Work.small(30_000); GC.start(full_mark: false) }
  end
  again = -> { exec(RbConfig.ruby, __FILE__, "after") }
  ARGV[0] == "thread" ? Thread.new(&again).join : again.call
end
