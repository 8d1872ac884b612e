// The plan's sections: tasks in queue order, with everything they point to laid out in the same order.
#include <algorithm>
#include <string>

#include "flow.h"
#include "hyper_mpmd/dtype.h"
#include "wide.h"

namespace hyper_mpmd::planner {

ProgramView view(const Program& program) {
  return {program.rank,     program.ranks, program.local_events, program.ops,    program.tensors, program.tasks,
          program.accesses, program.waits, program.signals,      program.events, program.peers,   program.costs};
}

std::vector<Pool> pools(const Device& device) {
  if (device.unified) return {{CoreKind::kBoth, static_cast<uint32_t>(device.aic)}};
  return {{CoreKind::kAic, static_cast<uint32_t>(device.aic)}, {CoreKind::kAiv, static_cast<uint32_t>(device.aiv)}};
}

namespace {

int64_t port_ns(u128 points, uint32_t dtype, const Device& device) {
  const u128 bytes = points * static_cast<uint64_t>(size_of(static_cast<DType>(dtype)));
  return static_cast<int64_t>(std::min<u128>(bytes * 1000 / static_cast<uint64_t>(device.link_total_bytes), kMaxTime));
}

}  // namespace

int64_t ProgramView::wire_ns(size_t task, const Device& device) const {
  const TaskRecord& t = tasks[task];
  if (ops[t.op].route == 0 || t.peer == static_cast<uint32_t>(rank)) return 0;
  const AccessRecord& box = accesses[t.access_begin];
  return port_ns(static_cast<u128>(box.rows) * box.cols, ops[t.op].dtype, device);
}

int64_t ProgramView::wire_ns(const EventRecord& event, const Device& device) const {
  return port_ns(static_cast<u128>(event.rows) * event.cols, tensors[event.tensor].dtype, device);
}

void check_times(const ProgramView& program, const Device& device) {
  const int64_t latency = device.event_ns + device.remote_ns + device.launch_ns;
  u128 total = static_cast<u128>(program.tasks.size() + 1) * static_cast<uint64_t>(latency);
  for (int64_t cost : program.costs) total += static_cast<uint64_t>(cost);
  for (size_t task = 0; task < program.tasks.size(); ++task) {
    total += static_cast<uint64_t>(program.wire_ns(task, device));
  }
  for (size_t e = static_cast<size_t>(program.local_events); e < program.events.size(); ++e) {
    const EventRecord& event = program.events[e];
    if (event.op != kNone) total += static_cast<uint64_t>(program.wire_ns(event, device));
  }
  if (total > kMaxTime) {
    throw PlanLimit("the tasks of rank " + std::to_string(program.rank) + " take " + decimal(total) +
                    " ns together; the limit is " + std::to_string(kMaxTime));
  }
}

void check(const ProgramView& p) {
  auto refuse = [](const std::string& what, size_t index, uint64_t value, uint64_t count) {
    throw BadProgram(what + " of " + std::to_string(index) + " is " + std::to_string(value) + ", but there are only " +
                     std::to_string(count));
  };
  if (p.costs.size() != p.tasks.size()) refuse("costs: number", p.tasks.size(), p.costs.size(), p.tasks.size());
  if (p.local_events < 0 || static_cast<size_t>(p.local_events) > p.events.size()) {
    refuse("local_events", 0, static_cast<uint64_t>(p.local_events), p.events.size());
  }
  for (size_t task = 0; task < p.tasks.size(); ++task) {
    const TaskRecord& t = p.tasks[task];
    if (t.op >= p.ops.size()) refuse("task: op", task, t.op, p.ops.size());
    if (p.costs[task] < 0) refuse("task: cost", task, static_cast<uint64_t>(p.costs[task]), 0);
    auto inside = [&](const char* what, uint64_t begin, uint64_t count, size_t size) {
      if (begin + count > size) refuse(std::string("task: last of its ") + what, task, begin + count, size);
    };
    inside("boxes", t.access_begin, t.access_count, p.accesses.size());
    inside("waits", t.wait_begin, t.wait_count, p.waits.size());
    inside("signals", t.signal_begin, t.signal_count, p.signals.size());
    for (const WaitRecord& wait : p.waits_of(task)) {
      if (wait.event >= p.events.size()) refuse("task: awaited event", task, wait.event, p.events.size());
    }
    if (p.ops[t.op].route != 0 && t.access_count == 0) refuse("task: boxes of a route", task, 0, 0);
  }
  for (size_t event = 0; event < p.events.size(); ++event) {
    const uint32_t op = p.events[event].op;
    if (op == kNone) continue;
    if (op >= p.ops.size()) refuse("event: op", event, op, p.ops.size());
    if (event >= static_cast<size_t>(p.local_events) && p.events[event].tensor >= p.tensors.size()) {
      refuse("event: tensor", event, p.events[event].tensor, p.tensors.size());
    }
  }
  for (size_t op = 0; op < p.ops.size(); ++op) {
    if (p.ops[op].kind > static_cast<uint32_t>(CoreKind::kAiv)) refuse("op: core kind", op, p.ops[op].kind, 2);
  }
}

// Where the host launches op by op, the end of a launch orders them: events of this rank's own are left out.
Plan assemble(const ProgramView& program, const Device& device, const Policy& policy) {
  const auto schedule = policy.how == Policy::How::kOp     ? schedule_o0
                        : policy.how == Policy::How::kList ? schedule_o1
                                                           : schedule_published;
  Placement place = schedule(program, device, policy);
  const auto dropped = static_cast<uint32_t>(policy.dispatched() ? program.local_events : 0);
  Plan plan;
  plan.ops.assign(program.ops.begin(), program.ops.end());
  plan.tensors.assign(program.tensors.begin(), program.tensors.end());
  plan.peers.assign(program.peers.begin(), program.peers.end());
  plan.events.assign(program.events.begin() + dropped, program.events.end());
  plan.launches = std::move(place.launches);
  plan.dependencies = std::move(place.dependencies);
  plan.tasks.reserve(program.tasks.size());
  plan.accesses.reserve(program.accesses.size());
  plan.waits.reserve(dropped ? 0 : program.waits.size());
  plan.signals.reserve(dropped ? 0 : program.signals.size());

  size_t queue = 0;
  for (const Pool& pool : pools(device)) {
    for (uint32_t core = 0; core < pool.cores; ++core, ++queue) {
      const auto& order = place.queues[queue];
      plan.queues.push_back({static_cast<uint32_t>(pool.kind), core, static_cast<uint32_t>(plan.tasks.size()),
                             static_cast<uint32_t>(order.size())});
      for (uint32_t number : order) {
        TaskRecord task = program.tasks[number];
        auto boxes = program.accesses.subspan(task.access_begin, task.access_count);
        task.access_begin = static_cast<uint32_t>(plan.accesses.size());
        plan.accesses.insert(plan.accesses.end(), boxes.begin(), boxes.end());
        task.wait_begin = static_cast<uint32_t>(plan.waits.size());
        for (const WaitRecord& wait : program.waits_of(number)) {
          if (wait.event >= dropped) plan.waits.push_back({wait.event - dropped, wait.threshold});
        }
        task.wait_count = static_cast<uint32_t>(plan.waits.size()) - task.wait_begin;
        task.signal_begin = static_cast<uint32_t>(plan.signals.size());
        for (const SignalRecord& signal : program.signals_of(number)) {
          if (!dropped || !program.is_local(signal)) plan.signals.push_back(signal);
        }
        task.signal_count = static_cast<uint32_t>(plan.signals.size()) - task.signal_begin;
        task.launch = place.launch[number];
        task.start_ns = place.start[number];
        task.end_ns = place.end[number];
        plan.tasks.push_back(task);
      }
    }
  }
  return plan;
}

}  // namespace hyper_mpmd::planner
