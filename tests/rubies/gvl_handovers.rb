# The same as gvl_events.rb, with thousands of handovers behind it.
HANDOVERS = 1500
require_relative "gvl_events"
