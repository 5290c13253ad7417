# A shop on Sinatra and SQLite with three kinds of work, for `cargo xtask bench --tune --app`:
#
#   /api    orders with their lines as JSON
#   /page   HTML of a template, with fragments in a cache of the process that keeps the last 60,000 of them, and is full from the start with SHOP_CACHE
#   /job    a CSV of 10,000 lines is parsed, summed up and stored
#   /stats  what Ruby has counted so far
require "csv"
require "erb"
require "json"
require "sinatra/base"
require "sqlite3"

class Shop < Sinatra::Base
  set :environment, :production
  set :logging, false
  set :protection, false
  set :static, false

  ORDERS = 2_000
  FRAGMENTS = 60_000
  PATH = ENV.fetch("SHOP_DB")
  LOCK = Mutex.new
  CACHE = {}
  TURN = [0]

  def self.connect
    SQLite3::Database.new(PATH).tap do |db|
      db.results_as_hash = true
      db.busy_timeout = 10_000
    end
  end

  # The same contents at every start.
  def self.seed
    db = connect
    db.execute_batch(<<~SQL)
      PRAGMA journal_mode = WAL;
      PRAGMA synchronous = OFF;
      CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, placed TEXT);
      CREATE TABLE lines (id INTEGER PRIMARY KEY, order_id INTEGER, article TEXT, amount INTEGER, cents INTEGER);
      CREATE INDEX lines_of ON lines (order_id);
      CREATE TABLE reports (id INTEGER PRIMARY KEY, article TEXT, amount INTEGER, cents INTEGER);
    SQL
    db.transaction do
      1.upto(ORDERS) do |id|
        db.execute("INSERT INTO orders VALUES (?, ?, ?)", [id, "customer #{id % 97}", "2026-01-#{1 + id % 28}"])
        5.times do |n|
          db.execute("INSERT INTO lines (order_id, article, amount, cents) VALUES (?, ?, ?, ?)",
                     [id, "article #{(id * 7 + n) % 211}", 1 + n, 100 + id % 900])
        end
      end
    end
    db.close
  end

  # As if it had run for a while.
  def self.fill
    renderer = new!
    1.upto(ORDERS) do |id|
      order = { "customer" => "customer #{id % 97}" }
      lines = Array.new(5) { |n| { "article" => "article #{(id * 7 + n) % 211}", "amount" => 1 + n, "cents" => 100 + id % 900 } }
      (FRAGMENTS / ORDERS).times { |n| CACHE[[id, n]] = renderer.article(order, lines) }
    end
  end

  TEMPLATE = ERB.new(<<~HTML)
    <article><h2><%= order["customer"] %></h2><ul>
    <% lines.each do |line| %><li><%= line["article"] %> x <%= line["amount"] %>: <%= format("%.2f", line["cents"] / 100.0) %></li>
    <% end %></ul></article>
  HTML

  TEMPLATE.def_method(self, "article(order, lines)")

  CSV_TEXT = CSV.generate { |csv| 10_000.times { |n| csv << ["article #{n % 211}", 1 + n % 9, 100 + n % 900] } }.freeze

  helpers do
    def db
      Thread.current[:shop_db] ||= Shop.connect
    end

    def turn
      LOCK.synchronize { TURN[0] += 1 }
    end

    def orders(first, count)
      db.execute("SELECT * FROM orders WHERE id >= ? ORDER BY id LIMIT ?", [first, count]).map do |order|
        [order, db.execute("SELECT * FROM lines WHERE order_id = ?", [order["id"]])]
      end
    end

    def fragment(order, lines, key)
      cached = LOCK.synchronize { CACHE[key] }
      return cached if cached
      html = article(order, lines)
      LOCK.synchronize do
        CACHE[key] = html
        CACHE.shift while CACHE.size > FRAGMENTS
      end
      html
    end
  end

  get "/api" do
    content_type :json
    found = orders(1 + turn * 13 % (ORDERS - 20), 20)
    JSON.generate(found.map { |order, lines| { order: order, lines: lines, sum: lines.sum { |l| l["amount"] * l["cents"] } } })
  end

  get "/page" do
    n = turn
    found = orders(1 + n * 13 % (ORDERS - 10), 10)
    body = found.map { |order, lines| fragment(order, lines, [order["id"], n % 50]) }
    "<!doctype html><title>Orders</title>#{body.join}"
  end

  get "/job" do
    rows = CSV.parse(CSV_TEXT).map { |article, amount, cents| { article: article, amount: amount.to_i, cents: cents.to_i } }
    sums = rows.group_by { |row| row[:article] }.map do |article, of_it|
      [article, of_it.sum { |row| row[:amount] }, of_it.sum { |row| row[:amount] * row[:cents] }]
    end
    LOCK.synchronize do
      db.transaction { sums.each { |sum| db.execute("INSERT INTO reports (article, amount, cents) VALUES (?, ?, ?)", sum) } }
    end
    sums.size.to_s
  end

  get "/stats" do
    content_type :json
    JSON.generate(GC.stat)
  end
end

Shop.seed
Shop.fill if ENV["SHOP_CACHE"]
run Shop
