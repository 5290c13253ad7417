# A workload that allocates like a small web application: two threads answer requests from a shared cache of live
# records and render them as JSON, without gems. It runs for the given number of seconds (default 12) or until
# SIGTERM, and reports at its end what it saw of its own garbage collection.

SECONDS = Float(ARGV.fetch(0, "12"))
RECORDS = 20_000
THREADS = 2

Record = Struct.new(:id, :name, :tags, :prices, :updated_at)

def now = Process.clock_gettime(Process::CLOCK_MONOTONIC)

def record(id)
  Record.new(id, "product #{id}", Array.new(4) { |i| "tag-#{(id * 7 + i) % 97}" }, Array.new(6) { |i| id * 0.5 + i }, now)
end

def render(value)
  case value
  when Hash then "{#{value.map { |key, item| "#{key.to_s.inspect}:#{render(item)}" }.join(",")}}"
  when Array then "[#{value.map { |item| render(item) }.join(",")}]"
  when Symbol then value.to_s.inspect
  when NilClass then "null"
  else value.inspect
  end
end

def parse_query(query)
  query.split("&").to_h { |pair| pair.split("=", 2) }
end

# One request: parameters, a page of records, a rendered answer; now and then records are replaced, so that old
# objects die too.
def answer(cache, lock, random)
  params = parse_query("page=#{random.rand(200)}&per=25&order=price&session=#{random.bytes(8).unpack1("H*")}")
  first = params["page"].to_i * 25
  page = lock.synchronize { Array.new(25) { |i| cache[(first + i) % RECORDS] } }
  rows = page.map { |r| { id: r.id, name: r.name.upcase, tags: r.tags.sort, total: r.prices.sum, seen: r.updated_at } }
  lock.synchronize { 10.times { id = random.rand(RECORDS); cache[id] = record(id) } }
  render({ status: "ok", session: params["session"], count: rows.size, rows: rows.sort_by { |row| row[:total] } })
end

stop = false
trap("TERM") { stop = true }
trap("INT") { stop = true }

cache = Array.new(RECORDS) { |id| record(id) }
lock = Mutex.new
finish = now + SECONDS
workers = Array.new(THREADS) do |number|
  Thread.new do
    random = Random.new(number)
    requests = bytes = 0
    until stop || now > finish
      bytes += answer(cache, lock, random).bytesize
      requests += 1
      sleep 0.002 # the database answers
    end
    [requests, bytes]
  end
end
requests, bytes = workers.map(&:value).transpose.map(&:sum)

stat = GC.stat
puts "requests=#{requests} mib=#{bytes >> 20} gc_count=#{stat[:count]} minor=#{stat[:minor_gc_count]} " \
     "major=#{stat[:major_gc_count]} gc_ms=#{stat[:time]}"
