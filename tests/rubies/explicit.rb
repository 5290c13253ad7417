# N explicit GC.start with allocation in between; reports Ruby's own figures of each explicit one.
require_relative "support"

rounds = Integer(ARGV[0] || 10)
Report.run do |extra|
  explicit = extra["explicit"] = []
  kept = []
  rounds.times do |i|
    Work.small(5_000 + 700 * (i % 7))
    Work.keep(kept, 500)
    if i % 3 == 2
      GC.start(full_mark: false)
    else
      GC.start
    end
    explicit << { "count" => GC.count }.merge(GC.latest_gc_info)
  end
end
