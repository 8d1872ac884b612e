// Which ops of a program wait for which, and the order that this gives them.
#include <algorithm>
#include <map>
#include <string>

#include "flow.h"

namespace hyper_mpmd::planner {

OpOrder::OpOrder(const ProgramView& program)
    : tasks_of(program.ops.size(),
               [&](auto&& pair) {
                 for (uint32_t task = 0; task < program.tasks.size(); ++task) pair(program.tasks[task].op, task);
               }),
      before(program.ops.size()) {
  std::vector<uint32_t> ops;  // those that have tasks, in order of their first
  std::vector<bool> seen(program.ops.size(), false);
  for (const TaskRecord& task : program.tasks) {
    if (!seen[task.op]) ops.push_back(task.op);
    seen[task.op] = true;
  }
  // The ops that signal each event; mostly one.
  std::vector<uint32_t> latest(program.events.size(), kNone);
  Groups signallers(program.events.size(), [&](auto&& pair) {
    std::fill(latest.begin(), latest.end(), kNone);
    for (size_t task = 0; task < program.tasks.size(); ++task) {
      const uint32_t op = program.tasks[task].op;
      for (const SignalRecord& signal : program.signals_of(task)) {
        if (!program.is_local(signal) || latest[signal.event] == op) continue;
        latest[signal.event] = op;
        pair(signal.event, op);
      }
    }
  });
  std::fill(latest.begin(), latest.end(), kNone);
  for (uint32_t op : ops) {
    auto& mine = before[op];
    for (uint32_t task : tasks_of[op]) {
      for (const WaitRecord& wait : program.waits_of(task)) {
        if (latest[wait.event] == op) continue;
        latest[wait.event] = op;
        for (uint32_t signaller : signallers[wait.event]) {
          if (std::find(mine.begin(), mine.end(), signaller) == mine.end()) mine.push_back(signaller);
        }
      }
    }
    std::sort(mine.begin(), mine.end());
  }

  std::vector<uint32_t> depth(program.ops.size(), kNone);
  std::map<std::pair<uint32_t, uint32_t>, std::vector<uint32_t>> found;
  for (uint32_t op : ops) {
    uint32_t deepest = 0;
    for (uint32_t b : before[op]) {
      if (depth[b] == kNone) {
        throw Cycle("op " + std::to_string(op) + " waits for op " + std::to_string(b) +
                    ", which does not come before it; this policy takes op by op, so no op may wait for itself or for "
                    "a later one");
      }
      if (program.ops[b].hop == program.ops[op].hop) deepest = std::max(deepest, depth[b] + 1);
    }
    depth[op] = deepest;
    found[{program.ops[op].hop, deepest}].push_back(op);
  }
  for (auto& [key, wave] : found) waves.push_back(std::move(wave));
}

}  // namespace hyper_mpmd::planner
