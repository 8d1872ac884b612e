// The shortest circle among queues that stand.
#include <algorithm>
#include <deque>
#include <unordered_map>

#include "prove_order.h"

namespace hyper_mpmd::prove {

namespace {

// Chain `from` stands for want of something that the task of another chain, or its own, would give.
struct Edge {
  uint32_t to, task;
};

}  // namespace

std::vector<Standing> shortest_circle(const Scene& scene, const std::vector<EventState>& events,
                                      const std::vector<uint32_t>& next) {
  const auto count = static_cast<uint32_t>(scene.chains.size());
  // What each chain lacks: an event, or launches to end.
  std::vector<Standing> at(count);
  std::vector<std::vector<uint64_t>> unfinished(scene.plans.size());
  for (size_t p = 0; p < scene.plans.size(); ++p) unfinished[p].assign(scene.plans[p].launches.size(), 0);
  for (uint32_t c = 0; c < count; ++c) {
    const auto& chain = scene.chains[c];
    const PlanView& plan = scene.plan(chain.rank);
    for (uint32_t t = next[c]; t < chain.end; ++t) ++unfinished[scene.index(chain.rank)][plan.tasks[t].launch];
  }
  std::unordered_map<uint64_t, std::vector<uint32_t>> lack_event, lack_launch;  // chains that stand for want of it
  for (uint32_t c = 0; c < count; ++c) {
    const auto& chain = scene.chains[c];
    if (next[c] == chain.end) continue;
    const PlanView& plan = scene.plan(chain.rank);
    const TaskRecord& task = plan.tasks[next[c]];
    at[c] = {chain.rank, chain.queue, next[c], kNone, 0, 0, chain.rank, kNone};
    bool closed = false;
    if (plan.dispatched()) {
      const LaunchRecord& launch = plan.launches[task.launch];
      for (const uint32_t before : plan.dependencies.subspan(launch.dependency_begin, launch.dependency_count)) {
        if (unfinished[scene.index(chain.rank)][before] == 0) continue;
        lack_launch[uint64_t{chain.rank} << 32 | before].push_back(c);
        closed = true;
      }
    }
    if (closed) continue;
    for (const WaitRecord& wait : plan.waits_of(task)) {
      const uint64_t number = scene.event(chain.rank, wait.event);
      if (events[number].have >= wait.threshold) continue;
      at[c].event = wait.event;
      at[c].have = events[number].have;
      at[c].need = wait.threshold;
      lack_event[number].push_back(c);
      break;
    }
  }
  std::vector<std::vector<Edge>> edges(count);
  const auto link = [&](const std::vector<uint32_t>& from, uint32_t to, uint32_t task) {
    for (const uint32_t c : from) {
      if (edges[c].empty() || edges[c].back().to != to) edges[c].push_back({to, task});
    }
  };
  for (uint32_t c = 0; c < count; ++c) {
    const auto& chain = scene.chains[c];
    const PlanView& plan = scene.plan(chain.rank);
    for (uint32_t t = next[c]; t < chain.end; ++t) {
      if (const auto found = lack_launch.find(uint64_t{chain.rank} << 32 | plan.tasks[t].launch);
          found != lack_launch.end()) {
        link(found->second, c, t);
      }
      for (const SignalRecord& signal : plan.signals_of(plan.tasks[t])) {
        if (!scene.has(signal.rank)) continue;
        const uint32_t number =
            signal.rank == chain.rank ? signal.event : scene.event_of_word(signal.rank, signal.event);
        if (number == kNone) continue;
        const auto found = lack_event.find(scene.event(signal.rank, number));
        if (found != lack_event.end()) link(found->second, c, t);
      }
    }
  }
  // Breadth first from each chain, no further than the best circle so far.
  std::vector<uint32_t> best, before(count), via(count), depth(count);
  std::vector<uint32_t> best_tasks;
  for (uint32_t start = 0; start < count && best.size() != 1; ++start) {
    std::fill(depth.begin(), depth.end(), kNone);
    std::deque<uint32_t> open{start};
    depth[start] = 0;
    bool found = false;
    while (!open.empty() && !found) {
      const uint32_t c = open.front();
      open.pop_front();
      if (!best.empty() && depth[c] + 1 >= best.size()) break;
      for (const Edge& edge : edges[c]) {
        if (edge.to == start) {
          best.assign(1, c);
          best_tasks.assign(1, edge.task);
          for (uint32_t on = c; on != start; on = before[on]) {
            best.push_back(before[on]);
            best_tasks.push_back(via[on]);
          }
          std::reverse(best.begin(), best.end());
          std::reverse(best_tasks.begin(), best_tasks.end());
          found = true;
          break;
        }
        if (depth[edge.to] != kNone) continue;
        depth[edge.to] = depth[c] + 1;
        before[edge.to] = c;
        via[edge.to] = edge.task;
        open.push_back(edge.to);
      }
    }
  }
  std::vector<Standing> circle;
  for (size_t i = 0; i < best.size(); ++i) {
    Standing standing = at[best[i]];
    standing.signaller_rank = scene.chains[best[(i + 1) % best.size()]].rank;
    standing.signaller = best_tasks[i];
    circle.push_back(standing);
  }
  return circle;
}

}  // namespace hyper_mpmd::prove
