# GC.stress in its variants, each for a short time.
require_relative "support"

Report.run do |extra|
  Work.small(20_000)
  modes = [true, 1, 2, 4, 7]
  modes.each do |mode|
    GC.stress = mode
    Work.small(8)
    Work.large(2, 10_000)
    GC.stress = false
    Work.small(3_000)
  end
  extra["modes"] = modes
end
