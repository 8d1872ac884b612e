// Policy O1: list scheduling in time order. Whenever a core is free it takes the ready task with the longest path to
// the end; hop levels go one after another, so that no queue goes down in hop level. What travels between ranks passes
// this rank's ports one box after another.
#include <algorithm>
#include <string>

#include "flow.h"

namespace hyper_mpmd::planner {

namespace {

// What decides among ready tasks. path: nanoseconds of the longest path from the start of the task to the end of the
// program. Of equals, turn: rows that stay on this rank travel first, since they need no port; other tasks go group by
// group, rows in the order in which the puts that wait for them visit peers, so that ranks at work on the same expert
// do not send to the same rank.
struct Urgency {
  std::vector<int64_t> path;
  std::vector<uint64_t> turn;
  std::vector<bool> arrives;  // by op
};

// All puts of one op share the largest path, so that their rank-aware order decides among them; it is no shorter than
// the time for which they keep this rank's port.
Urgency urgency(const ProgramView& program, const Device& device, const Policy& policy) {
  const size_t count = program.tasks.size();
  Urgency found{std::vector<int64_t>(count), std::vector<uint64_t>(count), std::vector<bool>(program.ops.size())};
  if (!policy.priorities) return found;
  const auto ranks = static_cast<uint32_t>(program.ranks), self = static_cast<uint32_t>(program.rank);
  for (size_t task = 0; task < count; ++task) {
    if (program.ops[program.tasks[task].op].route || program.signals_of(task).empty()) continue;
    for (const WaitRecord& wait : program.waits_of(task)) {
      if (wait.event < program.local_events || program.events[wait.event].op == kNone) continue;
      found.arrives[program.tasks[task].op] = true;
    }
  }
  // Of the tasks that wait for an event: the longest path, the earliest turn (rows that stay here go last).
  std::vector<int64_t> event_tail(program.events.size(), 0);
  std::vector<uint32_t> event_turn(program.events.size(), ranks);
  for (size_t first = count; first > 0;) {
    const size_t last = first;
    const uint32_t op = program.tasks[first - 1].op;
    const bool route = program.ops[op].route != 0, shared = route || found.arrives[op];
    while (first > 0 && program.tasks[first - 1].op == op && (shared || first == last)) --first;
    int64_t largest = 0, largest_tail = 0, wire = 0;
    uint64_t place[2] = {0, 0};  // among the op's puts that stay, and among those that leave
    for (size_t task = first; task < last; ++task) {
      int64_t tail = 0;
      uint32_t turn = ranks;
      for (const SignalRecord& signal : program.signals_of(task)) {
        if (program.is_local(signal)) {
          tail = std::max(tail, device.event_ns + event_tail[signal.event]);
          turn = std::min(turn, event_turn[signal.event]);
        } else if (signal.rank != self) {
          tail = std::max(tail, device.remote_ns);
          turn = std::min(turn, (signal.rank + ranks - self) % ranks);
        }
      }
      largest = std::max(largest, program.costs[task] + tail);
      largest_tail = std::max(largest_tail, tail);
      if (route) {
        wire += program.wire_ns(task, device);
        const bool leaves = program.tasks[task].peer != self;
        if (leaves) turn = (program.tasks[task].peer + ranks - self) % ranks;
        if (policy.rotation) found.turn[task] = 2 * place[leaves]++ + leaves;
      } else if (policy.rotation) {
        found.turn[task] = uint64_t{program.tasks[task].group} << 32 | turn;
      }
      for (const WaitRecord& wait : program.waits_of(task)) {
        event_turn[wait.event] = std::min(event_turn[wait.event], turn);
      }
    }
    largest = std::max(largest, wire + largest_tail);
    for (size_t task = first; task < last; ++task) {
      found.path[task] = largest;
      for (const WaitRecord& wait : program.waits_of(task)) {
        event_tail[wait.event] = std::max(event_tail[wait.event], largest);
      }
    }
  }
  return found;
}

// By op: the place of its hop level among all, or of (hop level, op).
std::vector<uint32_t> levels(const ProgramView& program, bool interleave) {
  std::vector<std::pair<uint32_t, uint32_t>> keys;
  for (uint32_t op = 0; op < program.ops.size(); ++op) keys.emplace_back(program.ops[op].hop, interleave ? 0 : op);
  auto places = keys;
  std::ranges::sort(places);
  places.erase(std::unique(places.begin(), places.end()), places.end());
  std::vector<uint32_t> found;
  for (const auto& key : keys) {
    found.push_back(static_cast<uint32_t>(std::ranges::lower_bound(places, key) - places.begin()));
  }
  return found;
}

struct Pending {
  int64_t ready_at, priority;
  uint32_t task;
};
struct Ready {
  int64_t priority;
  uint64_t turn;
  uint32_t task;
};
// Orders for std heaps, which keep the "largest" on top.
struct Later {
  bool operator()(const Pending& a, const Pending& b) const {
    if (a.ready_at != b.ready_at) return a.ready_at > b.ready_at;
    if (a.priority != b.priority) return a.priority < b.priority;
    return a.task > b.task;
  }
};
struct LessUrgent {
  bool operator()(const Ready& a, const Ready& b) const {
    if (a.priority != b.priority) return a.priority < b.priority;
    return a.turn != b.turn ? a.turn > b.turn : a.task > b.task;
  }
};
struct Core {
  int64_t free_at;
  uint32_t number;
  auto operator<=>(const Core&) const = default;
};

template <class Item, class Order>
class Heap {
 public:
  bool empty() const { return items_.empty(); }
  const Item& top() const { return items_.front(); }
  void push(const Item& item) {
    items_.push_back(item);
    std::push_heap(items_.begin(), items_.end(), Order());
  }
  Item pop() {
    std::pop_heap(items_.begin(), items_.end(), Order());
    Item item = items_.back();
    items_.pop_back();
    return item;
  }

 private:
  std::vector<Item> items_;
};

class ListScheduler {
 public:
  ListScheduler(const ProgramView& program, const Device& device, const Policy& policy)
      : p_(program),
        device_(device),
        level_of_(levels(program, policy.interleave)),
        urgency_(urgency(program, device, policy)),
        waiters_(program.events.size(),
                 [&](auto&& pair) {
                   for (uint32_t task = 0; task < program.tasks.size(); ++task) {
                     for (const WaitRecord& wait : program.waits_of(task)) pair(wait.event, task);
                   }
                 }),
        arrivals_(program, device) {
    const size_t count = p_.tasks.size();
    place_.start.resize(count);
    place_.end.resize(count);
    place_.launch.assign(count, 0);
    ready_at_.assign(count, 0);
    unmet_.assign(count, 0);
    event_at_.assign(p_.events.size(), 0);
    left_.reserve(p_.events.size());
    for (const EventRecord& event : p_.events) left_.push_back(event.threshold);
    for (const Pool& pool : pools(device)) {
      auto& mine = pools_.emplace_back();
      mine.first_queue = place_.queues.size();
      for (uint32_t core = 0; core < pool.cores; ++core) {
        mine.free.push({0, core});
        place_.queues.emplace_back().reserve(count / pool.cores);
      }
    }
  }

  Placement run();

 private:
  struct PoolState {
    Heap<Core, std::greater<>> free;
    Heap<Pending, Later> pending;
    Heap<Ready, LessUrgent> ready;
    size_t first_queue = 0;
    int64_t clock = 0;  // when the latest task of the level started: what is ready was not all ready before

    int64_t next_start() const { return std::max(free.top().free_at, ready.empty() ? pending.top().ready_at : clock); }
    bool idle() const { return pending.empty() && ready.empty(); }
  };

  PoolState& pool(uint32_t task) { return pools_[pool_of(p_, device_, p_.tasks[task].op)]; }
  uint64_t turn(uint32_t task) const {
    return urgency_.arrives[p_.tasks[task].op] ? static_cast<uint64_t>(ready_at_[task]) : urgency_.turn[task];
  }
  void release(uint32_t task) {
    PoolState& home = pool(task);
    // No task of the pool starts before, so it need not pend.
    if (ready_at_[task] <= std::max(home.free.top().free_at, home.clock)) {
      home.ready.push({urgency_.path[task], turn(task), task});
    } else {
      home.pending.push({ready_at_[task], urgency_.path[task], task});
    }
  }
  void receive(std::span<const uint32_t> members);
  void open(std::span<const uint32_t> members);
  void start_next(uint32_t level);

  const ProgramView& p_;
  const Device& device_;
  std::vector<uint32_t> level_of_;  // by op: its hop level; where ops are not to interleave, a level for each op
  Urgency urgency_;
  Groups waiters_;
  Arrivals arrivals_;
  Placement place_;
  std::vector<PoolState> pools_;
  std::vector<int64_t> ready_at_, event_at_;  // event_at: when the latest signal reaches the waiters
  std::vector<uint32_t> unmet_;
  std::vector<uint32_t> left_;          // signals that an event still wants; 0 once it is known when it comes
  int64_t port_out_ = 0, port_in_ = 0;  // when this rank's ports have passed all that was given to them
};

// When what these tasks wait for of other ranks will be here: it comes through this rank's port one box after another,
// in the order in which the boxes are sent.
void ListScheduler::receive(std::span<const uint32_t> members) {
  std::vector<std::pair<int64_t, uint32_t>> due;
  for (uint32_t task : members) {
    for (const WaitRecord& wait : p_.waits_of(task)) {
      if (wait.event < p_.local_events || left_[wait.event] == 0) continue;
      left_[wait.event] = 0;
      due.emplace_back(arrivals_.time(wait.event), wait.event);
    }
  }
  std::ranges::sort(due);
  for (const auto& [sent, event] : due) {
    event_at_[event] = sent;
    if (!arrivals_.known(event)) continue;
    port_in_ = std::max(port_in_ + p_.wire_ns(p_.events[event], device_), sent);
    event_at_[event] = port_in_;
  }
}

// Take the tasks of a hop level in: those that wait for nothing unfinished may start.
void ListScheduler::open(std::span<const uint32_t> members) {
  for (PoolState& pool : pools_) pool.clock = 0;
  receive(members);
  for (uint32_t task : members) {
    for (const WaitRecord& wait : p_.waits_of(task)) {
      if (wait.event >= p_.local_events) {
        ready_at_[task] = std::max(ready_at_[task], event_at_[wait.event]);
      } else if (left_[wait.event] > 0) {
        ++unmet_[task];
      }
    }
    if (!unmet_[task]) release(task);
  }
}

void ListScheduler::start_next(uint32_t level) {
  PoolState* pool = nullptr;
  int64_t now = 0;
  for (PoolState& candidate : pools_) {
    if (candidate.idle()) continue;
    const int64_t start = candidate.next_start();
    if (!pool || start < now) {
      pool = &candidate;
      now = start;
    }
  }
  pool->clock = now;
  while (!pool->pending.empty() && pool->pending.top().ready_at <= now) {
    const Pending due = pool->pending.pop();
    pool->ready.push({due.priority, turn(due.task), due.task});
  }
  const uint32_t task = pool->ready.pop().task;
  const uint32_t core = pool->free.pop().number;
  int64_t end = now + p_.costs[task];
  if (const int64_t wire = p_.wire_ns(task, device_)) {
    int64_t& port = p_.is_pull(task) ? port_in_ : port_out_;
    port = std::max(port, now) + wire;
    end = std::max(end, port);
  }
  place_.start[task] = now;
  place_.end[task] = end;
  place_.queues[pool->first_queue + core].push_back(task);
  pool->free.push({end, core});
  for (const SignalRecord& signal : p_.signals_of(task)) {
    if (!p_.is_local(signal)) continue;
    const uint32_t event = signal.event;
    event_at_[event] = std::max(event_at_[event], end + device_.event_ns);
    if (--left_[event]) continue;
    for (uint32_t waiter : waiters_[event]) {
      ready_at_[waiter] = std::max(ready_at_[waiter], event_at_[event]);
      if (level_of_[p_.tasks[waiter].op] == level && --unmet_[waiter] == 0) release(waiter);
    }
  }
}

Placement ListScheduler::run() {
  const uint32_t count = level_of_.empty() ? 0 : 1 + *std::ranges::max_element(level_of_);
  const Groups tasks_of(count, [&](auto&& pair) {
    for (uint32_t task = 0; task < p_.tasks.size(); ++task) pair(level_of_[p_.tasks[task].op], task);
  });
  for (uint32_t level = 0; level < count; ++level) {
    const auto members = tasks_of[level];
    open(members);
    auto busy = [](const PoolState& pool) { return !pool.idle(); };
    while (std::any_of(pools_.begin(), pools_.end(), busy)) start_next(level);
    size_t stuck = 0;
    uint32_t first_stuck = 0;
    for (uint32_t task : members) {
      if (unmet_[task] && !stuck++) first_stuck = task;
      arrivals_.add(p_.tasks[task].op, place_.end[task]);
    }
    if (stuck) {
      throw Cycle(std::to_string(stuck) + " task(s) at hop level " +
                  std::to_string(p_.ops[p_.tasks[first_stuck].op].hop) + " can never start; the first is task " +
                  std::to_string(first_stuck) + ": it waits for tasks of a later level, or for itself");
    }
  }
  int64_t end = 0;
  for (int64_t task_end : place_.end) end = std::max(end, task_end);
  place_.launches.push_back({kNone, static_cast<uint32_t>(p_.tasks.size()), 0, 0, 0, end});
  return std::move(place_);
}

}  // namespace

Placement schedule_o1(const ProgramView& program, const Device& device, const Policy& policy) {
  check_times(program, device);
  return ListScheduler(program, device, policy).run();
}

}  // namespace hyper_mpmd::planner
