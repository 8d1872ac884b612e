// Discrete events in rounds: at each moment everything that falls due is applied, then every core that can start its
// next task does, in order of rank and queue; what that makes due at the same moment is another round. Within a round
// the order changes nothing but the L2, and cores start in a fixed order.
#include "hyper_mpmd/simulate.h"

#include <algorithm>
#include <queue>
#include <unordered_map>

#include "simulate_l2.h"
#include "wide.h"

namespace hyper_mpmd {

namespace {

using planner::u128;

// A memory or a port: all transfers in progress pass at the same rate. `served` is what a transfer that has been there
// all the time has passed, in parts of a byte, so one transfer leaves when `served` reaches the mark that it was given.
class Server {
 public:
  explicit Server(int64_t bytes_per_us) : rate_(static_cast<u128>(bytes_per_us) * kByteParts) {}

  void join(int64_t now, int64_t bytes, uint32_t task) {
    advance(now);
    marks_.push({served_ + static_cast<u128>(bytes) * kByteParts, task});
  }
  // Calls done(task) for what is through.
  template <class Done>
  void leave(int64_t now, Done&& done) {
    advance(now);
    while (!marks_.empty() && marks_.top().at <= served_) {
      done(marks_.top().task);
      marks_.pop();
    }
  }
  bool idle() const { return marks_.empty(); }
  int64_t next() const {  // when the first of them is through if nothing else joins
    const u128 parts = (marks_.top().at - served_) * 1000 * marks_.size();
    return since_ + static_cast<int64_t>((parts + rate_ - 1) / rate_);
  }

  uint32_t version = 0;  // predictions of earlier versions are void
  bool changed = false;

 private:
  struct Mark {
    u128 at;
    uint32_t task;
    bool operator>(const Mark& other) const { return at > other.at; }
  };
  void advance(int64_t now) {
    if (!marks_.empty()) served_ += static_cast<u128>(now - since_) * rate_ / (1000 * marks_.size());
    since_ = now;
  }

  u128 rate_, served_ = 0;
  int64_t since_ = 0;
  std::priority_queue<Mark, std::vector<Mark>, std::greater<>> marks_;
};

// A number that looks random, the same for the same arguments (the finaliser of splitmix64).
uint64_t hash(uint64_t seed, uint64_t rank, uint64_t task) {
  uint64_t x = seed * 0x9e3779b97f4a7c15u + (rank << 32 | task) + 0x632be59bd9b4e019u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class Simulation {
 public:
  Simulation(std::span<const PlanView> plans, std::span<const std::vector<uint64_t>> gathered,
             const SimulatedDevice& device, const SimulateOptions& options,
             std::span<const std::span<SimulatedTask>> tasks);
  SimulateFault run();

 private:
  enum Kind : uint32_t { kCore, kLanding, kServer, kLaunch };
  struct Due {
    int64_t at;
    uint32_t kind, index, version;
    bool operator>(const Due& other) const { return at > other.at; }
  };
  struct Lane {  // the tasks of a queue; of the longest path: one task
    uint32_t rank, next, end;
    int64_t free_at = 0;
  };
  struct Event {
    uint32_t have = 0, standing = kNone;
    size_t landed = 0;  // its first landing in landed_
    bool remote = false;
  };
  struct Launch {
    uint32_t left = 0, closed = 0, standing = kNone;
    int64_t host_ns = 0, open_ns = -1;
    std::vector<uint32_t> after;
  };

  const TaskRecord& record(uint32_t rank, uint32_t task) const { return plans_[rank].tasks[task - task_begin_[rank]]; }
  SimulatedTask& result(uint32_t rank, uint32_t task) { return results_[rank][task - task_begin_[rank]]; }
  void number(std::span<const PlanView> plans);
  void due(int64_t at, Kind kind, uint32_t index, uint32_t version = 0) { due_.push({at, kind, index, version}); }
  void apply(const Due& what, int64_t now);
  void wake(uint32_t& first) {
    for (uint32_t lane = first; lane != kNone; lane = link_[lane]) woken_.push_back(lane);
    first = kNone;
  }
  void try_start(uint32_t lane, int64_t now);
  void start(uint32_t rank, uint32_t task, int64_t now);
  int64_t core_ns(const PlanView& plan, const TaskRecord& task, uint32_t number) const;
  void through(uint32_t task, int64_t now) {
    if (--left_[task] == 0) finish(task, now);
  }
  void finish(uint32_t task, int64_t now);
  void end_of_launch(uint32_t launch, int64_t now);
  void transfer(uint32_t server, int64_t bytes, uint32_t task, int64_t now);
  uint32_t pair_server(uint32_t from, uint32_t to);
  int64_t across(uint32_t rank, uint32_t task, const AccessRecord& box, bool written, int64_t now);

  std::span<const PlanView> plans_;
  std::span<const std::vector<uint64_t>> gathered_;
  const SimulatedDevice& device_;
  const SimulateOptions& options_;
  std::span<const std::span<SimulatedTask>> results_;
  std::vector<uint32_t> task_begin_, event_begin_, launch_begin_;
  std::vector<std::vector<std::pair<uint32_t, uint32_t>>> words_;  // [rank] (word, event), by word
  std::vector<Lane> lanes_;
  std::vector<uint32_t> link_, lane_of_, left_, woken_;
  std::vector<Event> events_;
  std::vector<Launch> launches_;
  std::vector<int64_t> landed_;
  std::vector<simulate::L2> l2_;
  std::vector<Server> servers_;  // [rank] its memory, its port out, its port in; then pairs of ranks
  std::unordered_map<uint64_t, uint32_t> pairs_;
  std::vector<uint32_t> changed_;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;
};

Simulation::Simulation(std::span<const PlanView> plans, std::span<const std::vector<uint64_t>> gathered,
                       const SimulatedDevice& device, const SimulateOptions& options,
                       std::span<const std::span<SimulatedTask>> tasks)
    : plans_(plans), gathered_(gathered), device_(device), options_(options), results_(tasks) {
  number(plans);
  for (const PlanView& plan : plans) {
    l2_.emplace_back(plan, device.l2_bytes);
    servers_.emplace_back(device.memory_bytes);
    servers_.emplace_back(device.link_total_bytes);
    servers_.emplace_back(device.link_total_bytes);
    for (const QueueRecord& queue : plan.queues) {
      const uint32_t begin = task_begin_[plan.rank] + queue.begin;
      const uint32_t step = options.path ? 1 : queue.count;
      for (uint32_t done = 0; done < queue.count; done += step) {
        for (uint32_t t = begin + done; t < begin + done + step; ++t) {
          lane_of_[t] = static_cast<uint32_t>(lanes_.size());
        }
        lanes_.push_back({plan.rank, begin + done, begin + done + step});
      }
    }
    const uint32_t first = launch_begin_[plan.rank];
    for (uint32_t l = 0; l < plan.launches.size(); ++l) {
      const LaunchRecord& record = plan.launches[l];
      Launch& launch = launches_[first + l];
      launch.closed = record.dependency_count + 1;  // and the host
      launch.host_ns = options.path ? 0 : (l + 1) * device.launch_ns;
      for (uint32_t before : plan.dependencies.subspan(record.dependency_begin, record.dependency_count)) {
        launches_[first + before].after.push_back(first + l);
      }
    }
    for (const TaskRecord& task : plan.tasks) ++launches_[first + task.launch].left;
    for (uint32_t l = 0; l < plan.launches.size(); ++l) due(launches_[first + l].host_ns, kLaunch, first + l);
  }
  link_.assign(lanes_.size(), kNone);
}

// Numbers for tasks, events and launches through all ranks, and room for the times at which signals land.
void Simulation::number(std::span<const PlanView> plans) {
  uint32_t tasks = 0, events = 0, launches = 0;
  for (const PlanView& plan : plans) {
    task_begin_.push_back(tasks);
    event_begin_.push_back(events);
    launch_begin_.push_back(launches);
    tasks += static_cast<uint32_t>(plan.tasks.size());
    events += static_cast<uint32_t>(plan.events.size());
    launches += static_cast<uint32_t>(plan.launches.size());
    auto& words = words_.emplace_back();
    for (uint32_t e = 0; e < plan.events.size(); ++e) {
      if (plan.events[e].slot != kNone) words.emplace_back(plan.events[e].slot, e);
    }
    std::sort(words.begin(), words.end());
  }
  events_.resize(events);
  launches_.resize(launches);
  lane_of_.resize(tasks);
  left_.assign(tasks, 0);
  for (const PlanView& plan : plans) {
    for (uint32_t e = 0; e < plan.events.size(); ++e) {
      events_[event_begin_[plan.rank] + e].remote = plan.events[e].slot != kNone;
    }
    for (const SignalRecord& signal : plan.signals) {
      if (signal.rank == plan.rank) {
        ++events_[event_begin_[plan.rank] + signal.event].landed;
        continue;
      }
      const auto& words = words_[signal.rank];
      const auto found = std::lower_bound(words.begin(), words.end(), std::pair<uint32_t, uint32_t>{signal.event, 0});
      if (found != words.end() && found->first == signal.event) {
        ++events_[event_begin_[signal.rank] + found->second].landed;
      }
    }
  }
  size_t all = 0;
  for (Event& event : events_) all += std::exchange(event.landed, all);
  landed_.resize(all);
}

int64_t Simulation::core_ns(const PlanView& plan, const TaskRecord& task, uint32_t number) const {
  int64_t ns = task.end_ns - task.start_ns;
  const OpRecord& op = plan.ops[task.op];
  if (op.route != 0) {  // the schedule foresees the link in it, which the simulation shares out
    int64_t bytes = 0;
    for (const AccessRecord& box : plan.accesses_of(task).subspan(op.read_count)) {
      bytes += l2_[box.rank].bytes(box);
    }
    ns = device_.task_ns + static_cast<int64_t>((static_cast<u128>(bytes) * 1000 + device_.vector_bytes - 1) /
                                                static_cast<u128>(device_.vector_bytes));
  }
  if (options_.jitter_ppm != 0) {
    const uint64_t ppm = hash(options_.seed, plan.rank, number) % (uint64_t{options_.jitter_ppm} + 1);
    ns += static_cast<int64_t>(static_cast<u128>(ns) * ppm / 1'000'000);
  }
  return ns;
}

uint32_t Simulation::pair_server(uint32_t from, uint32_t to) {
  const auto [found, added] = pairs_.try_emplace(uint64_t{from} << 32 | to, static_cast<uint32_t>(servers_.size()));
  if (added) servers_.emplace_back(device_.link_bytes);
  return found->second;
}

void Simulation::transfer(uint32_t server, int64_t bytes, uint32_t task, int64_t now) {
  if (bytes == 0) return;
  Server& at = servers_[server];
  at.join(now, bytes, task);
  ++left_[task];
  if (!at.changed) changed_.push_back(server);
  at.changed = true;
}

// A box of another rank, put there or pulled from there: the links and the peer's memory. Returns the nanoseconds that
// the links take with nobody else on them.
int64_t Simulation::across(uint32_t rank, uint32_t task, const AccessRecord& box, bool written, int64_t now) {
  const int64_t bytes = l2_[box.rank].bytes(box);
  if (options_.path) {
    const auto rate = static_cast<u128>(std::min(device_.link_bytes, device_.link_total_bytes));
    return static_cast<int64_t>((static_cast<u128>(bytes) * 1000 + rate - 1) / rate);
  }
  const uint32_t from = written ? rank : box.rank, to = written ? box.rank : rank;
  transfer(3 * box.rank, written ? l2_[box.rank].write(box, kNone) : l2_[box.rank].read(box, kNone), task, now);
  transfer(3 * from + 1, bytes, task, now);
  transfer(3 * to + 2, bytes, task, now);
  // Where one peer can have the whole port, the ports say it all.
  if (device_.link_bytes < device_.link_total_bytes) transfer(pair_server(from, to), bytes, task, now);
  return 0;
}

void Simulation::start(uint32_t rank, uint32_t task, int64_t now) {
  const PlanView& plan = plans_[rank];
  const TaskRecord& record = this->record(rank, task);
  const OpRecord& op = plan.ops[record.op];
  SimulatedTask& mine = result(rank, task);
  const uint32_t number = task - task_begin_[rank];
  int64_t core = core_ns(plan, record, number), memory = 0, links = 0;
  mine.start_ns = now;
  mine.core_ns = core;
  left_[task] = 1;
  const auto boxes = plan.accesses_of(record);
  for (uint32_t i = 0; i < boxes.size(); ++i) {
    AccessRecord box = boxes[i];
    if (box.rank != rank) {
      links = std::max(links, across(rank, task, box, i >= op.read_count, now));
      continue;
    }
    if (options_.path) continue;
    if (i < op.read_count && (gathered_[rank][record.op] >> std::min(i, 63u) & 1) && boxes.size() > op.read_count) {
      // Rows chosen by data: the tile's share of them, as if they lay in its own order.
      const AccessRecord& out = boxes[op.read_count];
      const uint64_t have = l2_[rank].rows(box.tensor), of = std::max<uint64_t>(1, l2_[out.rank].rows(out.tensor));
      const uint64_t begin = out.row * have / of, end = (uint64_t{out.row} + out.rows) * have / of;
      box.row = static_cast<uint32_t>(begin);
      box.rows = static_cast<uint32_t>(end - begin);
    }
    memory += i < op.read_count ? l2_[rank].read(box, number) : l2_[rank].write(box, number);
  }
  mine.memory_bytes = memory;
  transfer(3 * rank, memory, task, now);
  due(now + std::max(core, links), kCore, task);
}

void Simulation::try_start(uint32_t number, int64_t now) {
  Lane& lane = lanes_[number];
  if (lane.next == lane.end) return;
  const uint32_t task = lane.next;
  const TaskRecord& record = this->record(lane.rank, task);
  Launch& launch = launches_[launch_begin_[lane.rank] + record.launch];
  if (launch.open_ns < 0) {
    link_[number] = launch.standing;
    launch.standing = number;
    return;
  }
  int64_t ready = launch.open_ns;
  Held held = Held::kDispatch;
  for (const WaitRecord& wait : plans_[lane.rank].waits_of(record)) {
    if (wait.threshold == 0) continue;  // credit of the launch before: there is none before the first
    Event& event = events_[event_begin_[lane.rank] + wait.event];
    if (event.have < wait.threshold) {
      link_[number] = event.standing;
      event.standing = number;
      return;
    }
    const int64_t at = landed_[event.landed + wait.threshold - 1];
    if (at > ready) {
      ready = at;
      held = event.remote ? Held::kComm : Held::kData;
    }
  }
  SimulatedTask& mine = result(lane.rank, task);
  mine.blocked_ns = lane.free_at;
  mine.ready_ns = ready;
  mine.held = static_cast<uint32_t>(held);
  ++lane.next;
  lane.free_at = INT64_MAX;  // until the task ends
  start(lane.rank, task, now);
}

void Simulation::finish(uint32_t task, int64_t now) {
  Lane& lane = lanes_[lane_of_[task]];
  const uint32_t rank = lane.rank;
  const PlanView& plan = plans_[rank];
  const TaskRecord& record = this->record(rank, task);
  result(rank, task).end_ns = now;
  l2_[rank].end(task - task_begin_[rank]);
  lane.free_at = now;
  woken_.push_back(lane_of_[task]);
  for (const SignalRecord& signal : plan.signals_of(record)) {
    if (signal.rank == rank) {
      due(now + device_.event_ns, kLanding, event_begin_[rank] + signal.event);
      continue;
    }
    const auto& words = words_[signal.rank];
    const auto found = std::lower_bound(words.begin(), words.end(), std::pair<uint32_t, uint32_t>{signal.event, 0});
    if (found == words.end() || found->first != signal.event) continue;
    due(now + device_.latency(rank, signal.rank), kLanding, event_begin_[signal.rank] + found->second);
  }
  const uint32_t launch = launch_begin_[rank] + record.launch;
  if (--launches_[launch].left == 0) end_of_launch(launch, now);
}

void Simulation::end_of_launch(uint32_t launch, int64_t now) {
  for (uint32_t after : launches_[launch].after) due(now, kLaunch, after);
}

void Simulation::apply(const Due& what, int64_t now) {
  switch (what.kind) {
    case kCore:
      through(what.index, now);
      break;
    case kLanding: {
      Event& event = events_[what.index];
      landed_[event.landed + event.have++] = now;
      wake(event.standing);
      break;
    }
    case kServer: {
      Server& server = servers_[what.index];
      if (server.version != what.version) break;
      server.leave(now, [&](uint32_t task) { through(task, now); });
      if (!server.changed) changed_.push_back(what.index);
      server.changed = true;
      break;
    }
    case kLaunch: {
      Launch& launch = launches_[what.index];
      if (--launch.closed != 0) break;
      launch.open_ns = now;
      wake(launch.standing);
      if (launch.left == 0) end_of_launch(what.index, now);
      break;
    }
  }
}

SimulateFault Simulation::run() {
  for (uint32_t lane = 0; lane < lanes_.size(); ++lane) try_start(lane, 0);
  std::vector<Due> round;
  while (!due_.empty()) {
    const int64_t now = due_.top().at;
    round.clear();
    for (; !due_.empty() && due_.top().at == now; due_.pop()) round.push_back(due_.top());
    for (const Due& what : round) apply(what, now);
    std::sort(woken_.begin(), woken_.end());
    woken_.erase(std::unique(woken_.begin(), woken_.end()), woken_.end());
    for (uint32_t lane : woken_) {
      if (lanes_[lane].free_at <= now) try_start(lane, now);
    }
    woken_.clear();
    for (uint32_t number : changed_) {
      Server& server = servers_[number];
      server.changed = false;
      ++server.version;
      if (!server.idle()) due(server.next(), kServer, number, server.version);
    }
    changed_.clear();
  }
  SimulateFault fault;
  for (const Lane& lane : lanes_) {
    if (lane.next == lane.end) continue;
    if (fault.stuck == 0) {
      fault.rank = lane.rank;
      fault.task = lane.next - task_begin_[lane.rank];
    }
    fault.stuck += lane.end - lane.next;
  }
  return fault;
}

}  // namespace

SimulateFault simulate_plans(std::span<const PlanView> plans, std::span<const std::vector<uint64_t>> gathered,
                             const SimulatedDevice& device, const SimulateOptions& options,
                             std::span<const std::span<SimulatedTask>> tasks) {
  uint64_t most = 0;
  for (const PlanView& plan : plans) {
    if (std::string what = plan.record_fault(); !what.empty()) {
      return {"rank " + std::to_string(plan.rank) + ": " + what};
    }
    most += plan.tasks.size() + plan.events.size() + plan.launches.size();
  }
  if (std::string what = world_record_fault(plans); !what.empty()) return {what};
  if (most > kMaxIndex) return {"more tasks and events than one simulation can number"};
  return Simulation(plans, gathered, device, options, tasks).run();
}

}  // namespace hyper_mpmd
