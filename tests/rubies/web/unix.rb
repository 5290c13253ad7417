require_relative "puma_end"

threads 4, 4
quiet
early_hints true
