# A server that forks. First as Resque does: a child per job, one after the other, which ends by exit!. Then as Spring does:
# everything is loaded, several commands run in children at the same time, each with a name of its own, and end as programs
# do. Each child reports with the suffix ".job0", ".job1", …, ".command0", ….
require_relative "support"

JOBS = 8
COMMANDS = 4

Report.run do |extra|
  # What the children share.
  loaded = Work.keep([], 40_000)
  GC.start
  statuses = Array.new(JOBS) do |number|
    pid = fork do
      Report.run(".job#{number}", wait: false) do
        Work.small(20_000 * (1 + number % 3))
        GC.start(full_mark: number.even?)
      end
      exit!(number)
    end
    Process.wait2(pid)[1].exitstatus
  end
  commands = Array.new(COMMANDS) do |number|
    fork do
      $0 = "command #{number}"
      Report.run(".command#{number}", wait: false) do
        # Writes to what is shared, and makes garbage of it.
        loaded.each_slice(1 + number) { |nodes| nodes.first.other = nil }
        Work.small(60_000)
        GC.start
      end
      exit(100 + number)
    end
  end
  statuses += commands.map { |pid| Process.wait2(pid)[1].exitstatus }
  extra["statuses"] = statuses
end
