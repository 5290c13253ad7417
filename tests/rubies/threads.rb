# Collections on several threads, and finalizers that run after them.
require_relative "support"

Report.run do |extra|
  finalized = [0]
  workers = 3.times.map do |n|
    Thread.new do
      kept = []
      6.times do
        Work.small(30_000)
        Work.keep(kept, 2_000)
        40.times { ObjectSpace.define_finalizer(Object.new, proc { finalized[0] += 1 }) }
        GC.start(full_mark: n.zero?)
        Thread.pass
      end
    end
  end
  workers.each(&:join)
  GC.start
  extra["finalized"] = finalized[0]
end
