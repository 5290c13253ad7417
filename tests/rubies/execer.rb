# Collects garbage, then replaces itself by another Ruby program, which reports with the suffix ".after".
require_relative "support"

if ARGV[0] == "after"
  Report.run(".after", wait: false) do
    5.times { Work.small(30_000); GC.start }
  end
else
  Report.run do
    3.times { Work.small(30_000); GC.start(full_mark: false) }
  end
  exec(RbConfig.ruby, __FILE__, "after")
end
