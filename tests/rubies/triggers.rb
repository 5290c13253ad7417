# Each part has exactly one line that allocates, so that this line triggers every collection of the part.
require_relative "support"

def small_objects(count)
  i = 0
  while i < count
    last = [i, i] # small_objects
    i += 1
  end
  last
end

class Builder
  def self.strings(count)
    i = 0
    while i < count
      "x" * 2_000 # Builder.strings
      i += 1
    end
  end

  def in_a_block(count)
    1.times do
      i = 0
      while i < count
        Object.new # block in Builder#in_a_block
        i += 1
      end
    end
  end
end

def explicit
  GC.start # explicit
end

# The counts of the collections that began while the block ran, and the line that must have begun them.
def part(parts, method, line)
  GC.start
  first = GC.count
  yield
  parts << [method, line, first + 1, GC.count]
end

lines = File.readlines(__FILE__).each_with_index.map { |text, index| [text[/# (.*)/, 1], index + 1] }.to_h
parts = []
Report.run do |extra|
  part(parts, "small_objects", lines.fetch("small_objects")) { small_objects(1_500_000) }
  part(parts, "Builder.strings", lines.fetch("Builder.strings")) { Builder.strings(200_000) }
  builder = Builder.new
  part(parts, "block in Builder#in_a_block", lines.fetch("block in Builder#in_a_block")) { builder.in_a_block(1_000_000) }
  part(parts, "explicit", lines.fetch("explicit")) { explicit }
  # The test checks whose line it is, not whether the last one is named at the moment when the process ends.
  sleep 0.5
  extra["parts"] = parts
end
