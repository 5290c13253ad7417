# Each path runs methods of its own: /alpha/ID, /beta/ID and /gamma/ID, which compute, allocate and sleep.
module Work
  # CPU time of the thread: in other time it may only wait for the GVL, and then no sample sees it.
  def self.spin(seconds)
    till = Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) + seconds
    list = []
    list = Array.new(200) { |i| "text #{i}" } while Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) < till
    list.size
  end

  def self.only_alpha
    spin 0.012
    sleep 0.004
  end

  def self.only_beta
    spin 0.007
    sleep 0.009
  end

  def self.only_gamma
    spin 0.003
    GC.start(full_mark: false)
  end
end

run lambda { |env|
  case env["PATH_INFO"].split("/")[1]
  when "alpha" then Work.only_alpha
  when "beta" then Work.only_beta
  when "gamma" then Work.only_gamma
  end
  [200, { "content-type" => "text/plain" }, ["OK"]]
}
