# Actions of Rails controllers, and routes of Sinatra and Grape. Each computes for as long as it takes to be seen. Tests find the lines at
# which handlers begin by the paths behind "handles".
require "logger"
require "active_support"
require "active_support/core_ext"
require "action_controller"
require "sinatra/base"
require "grape"

module Work
  # CPU time of the thread: in other time it may only wait for the GVL, and then no sample sees it.
  def self.run(seconds = 0.015)
    now = -> { Process.clock_gettime(Process::CLOCK_THREAD_CPUTIME_ID) }
    till = now.call + seconds
    list = []
    list = Array.new(200) { |i| "text #{i}" } while now.call < till
    list.size.to_s
  end
end

class ApplicationController < ActionController::Base
  # A filter is no action.
  before_action { Work.run 0.004 }
  before_action(only: :halted) { render plain: Work.run }

  def inherited # handles /inherited
    render plain: Work.run
  end

  def halted = render(plain: "never")
end

class OrdersController < ApplicationController
  def show # handles /orders
    list = [1].map { Work.run }
    render plain: list.join
  end

  def nested # handles /nested
    self.status, _, body = Shop.call(Rack::MockRequest.env_for("/routes/1"))
    render plain: body.to_a.join
  end
end

class ListController < ActionController::API
  def index # handles /list
    render json: { work: Work.run }
  end
end

class BareController < ActionController::Metal
  def hi # handles /bare
    self.response_body = Work.run
  end
end

class Shop < Sinatra::Base
  set :host_authorization, permitted_hosts: []
  before { Work.run 0.004 }
  before("/stopped/*") { halt Work.run }

  get "/routes/:id" do # handles /shop/routes
    Work.run
  end

  get("/stopped/*") { "never" }
end

class Api < Grape::API
  format :txt
  before { Work.run 0.004 }

  get "/things/:id" do # handles /api/things
    Work.run
  end
end

ROUTES = ActionDispatch::Routing::RouteSet.new
ROUTES.draw do
  get "/orders/:id" => "orders#show"
  get "/inherited/:id" => "orders#inherited"
  get "/halted/:id" => "orders#halted"
  get "/nested/:id" => "orders#nested"
  get "/list/:id" => "list#index"
  get "/bare/:id" => "bare#hi"
end

map("/shop") { run Shop }
map("/api") { run Api }
map("/plain") { run ->(_) { [200, { "content-type" => "text/plain" }, [Work.run]] } }
map("/") { run ROUTES }
