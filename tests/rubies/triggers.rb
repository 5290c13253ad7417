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

# What follows in the code is on the line of the `end`.
def ends_in_an_array(value)
  [value, value] # ends_in_an_array
end

def ends_in_a_string(value)
  "x#{value}" # ends_in_a_string
end

# What comes before in the code is on another line.
def begins_with_a_literal(count)
  i = 0
  while i < count
    i += 1
    last = "literal" # begins_with_a_literal
  end
  last
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
  part(parts, "ends_in_an_array", lines.fetch("ends_in_an_array")) { 1_000_000.times { |i| ends_in_an_array(i) } }
  part(parts, "ends_in_a_string", lines.fetch("ends_in_a_string")) { 500_000.times { |i| ends_in_a_string(i) } }
  part(parts, "begins_with_a_literal", lines.fetch("begins_with_a_literal")) { begins_with_a_literal(1_000_000) }
  part(parts, "explicit", lines.fetch("explicit")) { explicit }
  # The test checks whose line it is, not whether the last one is named at the moment when the process ends.
  sleep 0.5
  extra["parts"] = parts
end
