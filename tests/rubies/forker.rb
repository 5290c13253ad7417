# Forks a child; both collect garbage. The child reports with the suffix ".child", a grandchild with ".grandchild".
require_relative "support"

Report.run do |extra|
  4.times { Work.small(30_000); GC.start }
  pid = fork do
    Report.run(".child", wait: false) do |child|
      3.times { Work.small(40_000); GC.start }
      grandchild = fork do
        Report.run(".grandchild", wait: false) do
          2.times { Work.small(40_000); GC.start(full_mark: false) }
        end
        exit!(0)
      end
      Process.wait(grandchild)
      child["status"] = $?.exitstatus
      child["grandchild"] = grandchild
    end
    exit!(0)
  end
  2.times { Work.small(30_000); GC.start }
  Process.wait(pid)
  Work.small(30_000)
  extra["child"] = pid
  extra["status"] = $?.exitstatus
end
