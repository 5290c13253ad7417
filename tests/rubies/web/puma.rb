require_relative "counts"
workers 2
threads 1, 3
on_worker_boot { Counts.say("begin") }
on_worker_shutdown { Counts.say("end") }
