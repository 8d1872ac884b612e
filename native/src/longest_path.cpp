// The longest path through a graph of weighted nodes and edges; its twin is in hyper_mpmd/scheduler/bounds.py.
#include <algorithm>
#include <string>

#include "flow.h"

namespace hyper_mpmd::planner {

int64_t longest_path(std::span<const int64_t> weights, std::span<const int64_t> sources,
                     std::span<const int64_t> targets, std::span<const int64_t> latencies) {
  const size_t count = weights.size();
  for (size_t edge = 0; edge < sources.size(); ++edge) {
    for (int64_t node : {sources[edge], targets[edge]}) {
      if (node < 0 || static_cast<size_t>(node) >= count) {
        throw BadProgram("edge " + std::to_string(edge) + " names node " + std::to_string(node) +
                         ", but there are only " + std::to_string(count));
      }
    }
  }
  std::vector<uint32_t> missing(count, 0), ready;
  for (int64_t target : targets) ++missing[target];
  const Groups leaving(count, [&](auto&& pair) {
    for (uint32_t edge = 0; edge < sources.size(); ++edge) pair(static_cast<uint32_t>(sources[edge]), edge);
  });
  std::vector<int64_t> start(count, 0);
  for (uint32_t node = 0; node < count; ++node) {
    if (!missing[node]) ready.push_back(node);
  }
  int64_t longest = 0;
  size_t visited = 0;
  for (; !ready.empty(); ++visited) {
    const uint32_t node = ready.back();
    ready.pop_back();
    const int64_t end = start[node] + weights[node];
    longest = std::max(longest, end);
    for (uint32_t edge : leaving[node]) {
      const auto target = static_cast<size_t>(targets[edge]);
      start[target] = std::max(start[target], end + latencies[edge]);
      if (--missing[target] == 0) ready.push_back(static_cast<uint32_t>(target));
    }
  }
  if (visited < count) {
    throw Cycle(std::to_string(count - visited) + " tasks and events wait for one another in a circle");
  }
  return longest;
}

}  // namespace hyper_mpmd::planner
