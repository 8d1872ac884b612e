// Policy published, the baseline of one launch: each core kind has one queue, wave by wave of ops, the ops of a wave
// group by group in turn (a weight gradient of one expert beside the other gradient of it). Core c of N takes places c,
// c + N, c + 2N, ... of it, whatever the tasks cost.
#include <algorithm>

#include "flow.h"

namespace hyper_mpmd::planner {

Placement schedule_published(const ProgramView& p, const Device& device, const Policy& policy) {
  check_times(p, device);
  const OpOrder order(p);
  Arrivals arrivals(p, device);
  Placement place;
  place.start.resize(p.tasks.size());
  place.end.resize(p.tasks.size());
  place.launch.assign(p.tasks.size(), 0);
  struct Queue {
    size_t first, next = 0;
    std::vector<int64_t> free;
  };
  std::vector<Queue> queues;
  for (const Pool& pool : pools(device)) {
    queues.push_back({place.queues.size(), 0, std::vector<int64_t>(pool.cores, 0)});
    place.queues.resize(place.queues.size() + pool.cores);
  }
  std::vector<int64_t> event_at(p.events.size(), 0);  // when the latest signal reaches the waiters
  int64_t latest = 0;
  std::vector<uint32_t> members;
  for (const auto& wave : order.waves) {
    members.clear();
    for (uint32_t op : wave) members.insert(members.end(), order.tasks_of[op].begin(), order.tasks_of[op].end());
    if (policy.interleave) {
      std::ranges::stable_sort(members, {}, [&](uint32_t task) { return p.tasks[task].group; });
    }
    for (uint32_t task : members) {
      Queue& queue = queues[pool_of(p, device, p.tasks[task].op)];
      const size_t core = queue.next++ % queue.free.size();
      int64_t start = queue.free[core];
      for (const WaitRecord& wait : p.waits_of(task)) {
        start = std::max(start, wait.event < p.local_events ? event_at[wait.event] : arrivals.time(wait.event));
      }
      const int64_t end = start + p.costs[task];
      place.start[task] = start;
      place.end[task] = queue.free[core] = end;
      place.queues[queue.first + core].push_back(task);
      latest = std::max(latest, end);
      for (const SignalRecord& signal : p.signals_of(task)) {
        if (p.is_local(signal)) event_at[signal.event] = std::max(event_at[signal.event], end + device.event_ns);
      }
    }
    for (uint32_t op : wave) {
      for (uint32_t task : order.tasks_of[op]) arrivals.add(op, place.end[task]);
    }
  }
  place.launches.push_back({kNone, static_cast<uint32_t>(p.tasks.size()), 0, 0, 0, latest});
  return place;
}

}  // namespace hyper_mpmd::planner
