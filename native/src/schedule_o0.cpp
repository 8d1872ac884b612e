// Policy O0: a launch an op. Independent ops of one wave run on disjoint shares of the cores where they fit.
// Policy serial: the same with one op at a time, each on all cores of its kind.
#include <algorithm>
#include <functional>
#include <queue>
#include <string>

#include "flow.h"
#include "wide.h"

namespace hyper_mpmd::planner {

namespace {

struct Share {
  size_t pool;
  uint32_t first, last;  // cores
};

class OpByOp {
 public:
  OpByOp(const ProgramView& program, const Device& device, bool serial)
      : p_(program),
        device_(device),
        serial_(serial),
        pools_(pools(device)),
        arrivals_(program, device),
        order_(program),
        tasks_of_(order_.tasks_of) {}

  Placement run();

 private:
  void partition(const std::vector<uint32_t>& wave);
  void launch(uint32_t op);

  const ProgramView& p_;
  const Device& device_;
  const bool serial_;
  std::vector<Pool> pools_;
  Arrivals arrivals_;
  const OpOrder order_;
  const Groups& tasks_of_;
  std::vector<Share> share_;
  std::vector<std::vector<int64_t>> free_;  // [pool][core]
  std::vector<size_t> first_queue_;
  std::vector<uint32_t> launch_of_;
  int64_t host_ = 0;
  Placement place_;
};

// Disjoint shares by work where the ops of a wave fit, else all cores in turn.
void OpByOp::partition(const std::vector<uint32_t>& wave) {
  for (size_t pool = 0; pool < pools_.size(); ++pool) {
    const uint32_t count = pools_[pool].cores;
    std::vector<uint32_t> mine;
    for (uint32_t op : wave) {
      if (pool_of(p_, device_, op) == pool) mine.push_back(op);
    }
    if (mine.size() > count) {
      for (uint32_t op : mine) share_[op] = {pool, 0, count};
      continue;
    }
    std::vector<u128> work;
    u128 total = 0;
    for (uint32_t op : mine) {
      auto& sum = work.emplace_back(0);
      for (uint32_t task : tasks_of_[op]) sum += static_cast<uint64_t>(p_.costs[task]);
      total += sum;
    }
    if (total == 0) total = 1;
    const auto spare = static_cast<uint32_t>(count - mine.size());
    std::vector<uint32_t> size;
    uint32_t given = 0;
    for (auto sum : work) given += size.emplace_back(1 + static_cast<uint32_t>(spare * sum / total));
    for (size_t i = 0; i < mine.size() && given < count; ++i, ++given) ++size[i];
    uint32_t first = 0;
    for (size_t i = 0; i < mine.size(); ++i) {
      share_[mine[i]] = {pool, first, first + size[i]};
      first += size[i];
    }
  }
}

void OpByOp::launch(uint32_t op) {
  const auto [pool, first, last] = share_[op];
  const auto number = static_cast<uint32_t>(place_.launches.size());
  const auto dependency_begin = static_cast<uint32_t>(place_.dependencies.size());
  if (!serial_) {
    for (uint32_t b : order_.before[op]) place_.dependencies.push_back(launch_of_[b]);
  } else if (number != 0) {
    place_.dependencies.push_back(number - 1);  // which waited for all before it
  }
  std::sort(place_.dependencies.begin() + dependency_begin, place_.dependencies.end());
  host_ += device_.launch_ns;
  int64_t begin = host_;
  for (size_t d = dependency_begin; d < place_.dependencies.size(); ++d) {
    begin = std::max(begin, place_.launches[place_.dependencies[d]].end_ns);
  }
  using Load = std::pair<int64_t, uint32_t>;
  std::vector<Load> loads;
  for (uint32_t core = first; core < last; ++core) loads.emplace_back(std::max(free_[pool][core], begin), core);
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least(std::greater<>(), std::move(loads));
  int64_t start = -1, end = -1;
  for (uint32_t task : tasks_of_[op]) {
    auto [now, core] = least.top();
    least.pop();
    for (const WaitRecord& wait : p_.waits_of(task)) {
      if (wait.event >= p_.local_events) now = std::max(now, arrivals_.time(wait.event));
    }
    const int64_t done = now + p_.costs[task];
    place_.start[task] = now;
    place_.end[task] = done;
    place_.launch[task] = number;
    place_.queues[first_queue_[pool] + core].push_back(task);
    least.emplace(done, core);
    start = start < 0 ? now : std::min(start, now);
    end = std::max(end, done);
  }
  for (; !least.empty(); least.pop()) free_[pool][least.top().second] = least.top().first;
  launch_of_[op] = number;
  const auto dependency_count = static_cast<uint32_t>(place_.dependencies.size() - dependency_begin);
  place_.launches.push_back(
      {op, static_cast<uint32_t>(tasks_of_[op].size()), dependency_begin, dependency_count, start, end});
  for (uint32_t task : tasks_of_[op]) arrivals_.add(op, place_.end[task]);
}

Placement OpByOp::run() {
  share_.resize(p_.ops.size());
  launch_of_.assign(p_.ops.size(), kNone);
  place_.start.resize(p_.tasks.size());
  place_.end.resize(p_.tasks.size());
  place_.launch.resize(p_.tasks.size());
  for (const Pool& pool : pools_) {
    first_queue_.push_back(place_.queues.size());
    place_.queues.resize(place_.queues.size() + pool.cores);
    free_.emplace_back(pool.cores, 0);
  }
  for (const auto& wave : order_.waves) {
    if (serial_) {
      for (uint32_t op : wave) {
        partition({op});
        launch(op);
      }
    } else {
      partition(wave);
      for (uint32_t op : wave) launch(op);
    }
  }
  return std::move(place_);
}

}  // namespace

Placement schedule_o0(const ProgramView& program, const Device& device, const Policy& policy) {
  check_times(program, device);
  return OpByOp(program, device, policy.serial).run();
}

}  // namespace hyper_mpmd::planner
