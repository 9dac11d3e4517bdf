# Drives ActiveRecord through the line protocol of `src/job.rs`: one job, a thread for each task.

require "json"
require "active_record"
require "pg"

def clock = Process.clock_gettime(Process::CLOCK_MONOTONIC, :nanosecond)

def cpu = Process.clock_gettime(Process::CLOCK_PROCESS_CPUTIME_ID, :microsecond)

if ARGV[0] == "--version"
  puts "#{ActiveRecord::VERSION::STRING}, pg #{PG::VERSION}, Ruby #{RUBY_VERSION}"
  exit
end

JOB = JSON.parse($stdin.gets)
ActiveRecord::Base.establish_connection(
  url: JOB["url"].sub("postgres://", "postgresql://"), pool: JOB["tasks"] + 1, checkout_timeout: 60
)

# The row under `with_lock`, which reads it again with FOR UPDATE in a transaction.
class Locked < ActiveRecord::Base
  self.table_name = "bench_row"
  self.locking_column = "no_such_column"

  def self.once
    granted = let_go = nil
    row = find(0)
    row.with_lock do
      granted = clock
      row.update!(value: row.value + 1)
      let_go = clock
    end
    [granted, let_go, 1]
  end
end

# The row with optimistic locking, read again at each conflict.
class WithVersion < ActiveRecord::Base
  self.table_name = "bench_row"
  self.locking_column = "version"

  def self.once
    attempts = 0
    begin
      attempts += 1
      row = find(0)
      granted = clock
      row.update!(value: row.value + 1)
      [granted, clock, attempts]
    rescue ActiveRecord::StaleObjectError
      retry
    end
  end
end

PEER = JOB["contender"].end_with?("with_lock") ? Locked : WithVersion
COLUMNS = %w[key asked granted let_go done].freeze

def new_part = { "attempts" => 0, "refused" => 0, "operations" => COLUMNS.to_h { |name| [name, []] } }

def task(began, finish)
  part = new_part
  operations = part["operations"]
  loop do
    asked = clock
    granted, let_go, attempts = PEER.once
    done = clock
    operations["key"] << 0
    operations["asked"] << asked - began
    operations["granted"] << granted - began
    operations["let_go"] << let_go - began
    operations["done"] << done - began
    part["attempts"] += attempts
    break if clock >= finish
  end
  ActiveRecord::Base.connection_pool.release_connection
  part
end

def work(milliseconds)
  began = clock
  cpu_before = cpu
  finish = began + milliseconds * 1_000_000
  parts = Array.new(JOB["tasks"]) { Thread.new { task(began, finish) } }.map(&:value)
  seen = new_part.merge("began" => began, "cpu_us" => cpu - cpu_before)
  parts.each do |part|
    seen["attempts"] += part["attempts"]
    COLUMNS.each { |name| seen["operations"][name].concat(part["operations"][name]) }
  end
  seen
end

def say(value)
  puts JSON.generate(value)
  $stdout.flush
end

Thread.report_on_exception = false
warm = work(0)
say({ "ready" => { "done" => warm["operations"]["key"].length } })
$stdin.gets
say({ "finished" => work(JOB["warm_ms"] + JOB["run_ms"]) })
