require_relative "puma_end"
require_relative "counts"
workers 2
threads 1, 3
on_worker_boot { Counts.begin }
on_worker_shutdown { Counts.end }
