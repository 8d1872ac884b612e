// A world flattened for the explorer: tasks with numbered counters, queues, and which tasks touch the same bytes.
#pragma once

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hyper_mpmd/dtype.h"
#include "hyper_mpmd/explore.h"

namespace hyper_mpmd::explore {

// Everything that a task can have to wait for is a counter: an event, how many tasks of the rank or (O0) of one of its
// launch records ended, how many launches of the rank ended.
struct Need {
  uint32_t counter;
  uint32_t threshold;
  uint32_t a_launch;               // what the base grows by with each launch
  uint32_t event = kNone;          // which event it is,
  uint32_t launch_record = kNone;  // or which launch record
};

// A task of a plan, or (number kNone) the end of a rank's launch, which has a queue of its own.
struct Task {
  uint32_t rank, number;
  std::vector<Need> needs;
  std::vector<uint32_t> signals;  // counters
};

struct Queue {
  uint32_t rank;
  std::vector<uint32_t> tasks;
};

struct Counter {
  uint32_t rank, event, word;  // word kNone: a counter of this rank's own; event kNone: nothing counts it
  uint32_t a_launch;           // sum of the thresholds of its events
  uint32_t signals = 0;        // in one launch, credits included
  bool is_event = true;        // false for those that count tasks or launches
};

class World {
 public:
  // together: all ranks share a process, and end a launch together.
  World(std::span<const Sections> plans, bool together) : plans_(plans) {
    const auto ranks = static_cast<uint32_t>(plans.size());
    for (uint32_t r = 0; r < ranks; ++r) check(r);
    for (uint32_t r = 0; r < ranks; ++r) add_counters(r);
    for (uint32_t r = 0; r < ranks; ++r) add_tasks(r);
    for (uint32_t r = 0; r < ranks; ++r) add_end(r, together);
    if (tasks.size() > kMaxTasks) {
      throw std::length_error("a small world has at most " + std::to_string(kMaxTasks) + " tasks");
    }
    for (const Task& task : tasks) {
      for (const uint32_t counter : task.signals) ++counters[counter].signals;
    }
    find_conflicts();
  }

  std::vector<Task> tasks;
  std::vector<Queue> queues;  // those with tasks
  std::vector<Counter> counters;
  std::vector<uint32_t> task_count;            // [rank]
  std::vector<std::vector<uint32_t>> credits;  // [rank]: the counters that its launches raise at their end
  std::vector<Clash> overflows;

  bool conflict(uint32_t a, uint32_t b) const { return conflicts_[size_t{a} * tasks.size() + b] != 0; }

  // The two boxes over which tasks a and b conflict.
  Clash clash(uint32_t a, uint32_t b) const {
    for (const Box& one : boxes_[a]) {
      for (const Box& other : boxes_[b]) {
        if ((one.written || other.written) && share_bytes(one, other)) {
          return {{tasks[a].rank, tasks[a].number, 0}, {tasks[b].rank, tasks[b].number, 0}, one.access, other.access};
        }
      }
    }
    return {};
  }

 private:
  // Bytes [begin + i * stride, begin + i * stride + width) for each of `rows` i, in one piece of memory. `tensor`:
  // where the tensor begins, whose rows are `stride` bytes each.
  struct Box {
    std::tuple<uint32_t, uint32_t, uint32_t> memory;  // rank, role, and the storage where each tensor has its own
    uint64_t tensor, begin, stride, width, rows;
    uint32_t access;
    bool written;
  };

  static bool share_bytes(const Box& a, const Box& b) {
    if (a.memory != b.memory) return false;
    if (a.tensor == b.tensor && a.stride == b.stride) {
      const uint64_t a_row = (a.begin - a.tensor) / a.stride, a_col = (a.begin - a.tensor) % a.stride;
      const uint64_t b_row = (b.begin - b.tensor) / b.stride, b_col = (b.begin - b.tensor) % b.stride;
      return a_row < b_row + b.rows && b_row < a_row + a.rows && a_col < b_col + b.width && b_col < a_col + a.width;
    }
    uint64_t i = 0, j = 0;
    while (i < a.rows && j < b.rows) {
      const uint64_t a_begin = a.begin + i * a.stride, b_begin = b.begin + j * b.stride;
      if (a_begin + a.width <= b_begin) {
        i += std::max<uint64_t>(1, (b_begin - a_begin - a.width) / a.stride);
      } else if (b_begin + b.width <= a_begin) {
        j += std::max<uint64_t>(1, (a_begin - b_begin - b.width) / b.stride);
      } else {
        return true;
      }
    }
    return false;
  }

  static constexpr uint64_t kMaxSize = uint64_t{1} << 56;  // points, or bytes: sums of these stay within 64 bits

  template <class... Parts>
  static void require(bool good, const Parts&... parts) {
    if (good) return;
    std::string what;
    ((what += parts), ...);
    throw std::invalid_argument(what);
  }

  // Nothing may point past its section. Whether the plan is any good is not asked here.
  void check(uint32_t rank) const {
    const Sections& plan = plans_[rank];
    const std::string where = "rank " + std::to_string(rank) + ": ";
    const auto inside = [](uint64_t begin, uint64_t count, uint64_t size) { return begin + count <= size; };
    require(plan.peers.size() == plans_.size(), where, "peers: one record a rank is needed");
    for (const TensorRecord& tensor : plan.tensors) {
      require(tensor.dtype < kDTypeCount && tensor.role <= 3 && tensor.storage < plan.tensors.size() &&
                  tensor.rows <= kMaxIndex && tensor.cols <= kMaxIndex && tensor.offset <= kMaxSize &&
                  (tensor.cols == 0 || tensor.rows <= kMaxSize / tensor.cols),
              where, "a tensor's dtype, role, storage or size");
    }
    for (const TaskRecord& task : plan.tasks) {
      require(task.op < plan.ops.size() && task.launch < plan.launches.size() &&
                  inside(task.access_begin, task.access_count, plan.accesses.size()) &&
                  inside(task.wait_begin, task.wait_count, plan.waits.size()) &&
                  inside(task.signal_begin, task.signal_count, plan.signals.size()),
              where, "a task points past a section");
    }
    for (const AccessRecord& access : plan.accesses) {
      require(access.rank < plans_.size() && access.tensor < plan.tensors.size() &&
                  access.tensor < plans_[access.rank].tensors.size(),
              where, "a box of no tensor");
    }
    for (const WaitRecord& wait : plan.waits) require(wait.event < plan.events.size(), where, "a wait for no event");
    for (const SignalRecord& signal : plan.signals) {
      require(signal.rank < plans_.size(), where, "a signal to no rank");
      require(signal.rank != rank || (signal.event < plan.events.size() && plan.events[signal.event].slot == kNone),
              where, "a signal to no event of this rank's own");
    }
    for (const LaunchRecord& launch : plan.launches) {
      require(inside(launch.dependency_begin, launch.dependency_count, plan.dependencies.size()), where,
              "a launch's dependencies");
    }
    for (const uint32_t tensor : plan.outputs) require(tensor < plan.tensors.size(), where, "an output of no tensor");
    for (const uint32_t before : plan.dependencies) {
      require(before < plan.launches.size(), where, "a launch that waits for none");
    }
    uint64_t next = 0;
    for (const QueueRecord& queue : plan.queues) {
      require(queue.begin == next && inside(queue.begin, queue.count, plan.tasks.size()), where,
              "queues that do not follow one another");
      next += queue.count;
    }
    require(next == plan.tasks.size(), where, "tasks that stand in no queue");
  }

  uint32_t new_counter(uint32_t rank, uint32_t event, uint32_t word) {
    counters.push_back({rank, event, word, 0});
    return static_cast<uint32_t>(counters.size() - 1);
  }

  uint32_t word_counter(uint32_t rank, uint32_t word) {
    const auto [entry, is_new] = words_.try_emplace({rank, word}, 0);
    if (is_new) entry->second = new_counter(rank, kNone, word);
    return entry->second;
  }

  void add_counters(uint32_t rank) {
    std::vector<uint32_t>& mine = events_.emplace_back();
    for (uint32_t e = 0; e < plans_[rank].events.size(); ++e) {
      const EventRecord& event = plans_[rank].events[e];
      mine.push_back(event.slot == kNone ? new_counter(rank, e, kNone) : word_counter(rank, event.slot));
      counters[mine.back()].event = e;
      counters[mine.back()].a_launch += event.threshold;
    }
    tasks_ended_.push_back(new_counter(rank, kNone, kNone));
    launches_ended_.push_back(new_counter(rank, kNone, kNone));
    counters[tasks_ended_[rank]].is_event = counters[launches_ended_[rank]].is_event = false;
  }

  void add_tasks(uint32_t rank) {
    const Sections& plan = plans_[rank];
    const bool dispatched = plan.launches.size() != 1 || plan.launches[0].op != kNone;
    const auto first_launch = static_cast<uint32_t>(counters.size());
    for (uint32_t l = 0; dispatched && l < plan.launches.size(); ++l) {
      new_counter(rank, kNone, kNone);
      counters.back().is_event = false;
    }
    for (const QueueRecord& record : plan.queues) {
      if (record.count == 0) continue;
      Queue& queue = queues.emplace_back(Queue{rank, {}});
      for (uint32_t t = record.begin; t < record.begin + record.count; ++t) {
        const TaskRecord& task = plan.tasks[t];
        queue.tasks.push_back(static_cast<uint32_t>(tasks.size()));
        Task& made = tasks.emplace_back(Task{rank, t, {}, {}});
        made.needs.push_back({launches_ended_[rank], 0, 1});
        made.signals.push_back(tasks_ended_[rank]);
        if (dispatched) {
          const LaunchRecord& launch = plan.launches[task.launch];
          for (const uint32_t before : plan.dependencies.subspan(launch.dependency_begin, launch.dependency_count)) {
            const uint32_t count = plan.launches[before].task_count;
            made.needs.push_back({first_launch + before, count, count, kNone, before});
          }
          made.signals.push_back(first_launch + task.launch);
        }
        for (const WaitRecord& wait : plan.waits.subspan(task.wait_begin, task.wait_count)) {
          const uint32_t counter = events_[rank][wait.event];
          made.needs.push_back({counter, wait.threshold, counters[counter].a_launch, wait.event});
        }
        for (const SignalRecord& signal : plan.signals.subspan(task.signal_begin, task.signal_count)) {
          made.signals.push_back(signal.rank == rank ? events_[rank][signal.event]
                                                     : word_counter(signal.rank, signal.event));
        }
        add_boxes(rank, t);
      }
    }
  }

  void add_end(uint32_t rank, bool together) {
    const Sections& plan = plans_[rank];
    queues.push_back({rank, {static_cast<uint32_t>(tasks.size())}});
    Task& end = tasks.emplace_back(Task{rank, kNone, {}, {launches_ended_[rank]}});
    for (uint32_t r = 0; r < plans_.size(); ++r) {
      const auto count = static_cast<uint32_t>(plans_[r].tasks.size());
      if (r == rank || together) end.needs.push_back({tasks_ended_[r], count, count});
    }
    for (uint32_t e = 0; e < plan.events.size() && !together; ++e) {
      const EventRecord& event = plan.events[e];
      if (event.slot == kNone || event.op == kNone) continue;
      end.needs.push_back({events_[rank][e], event.threshold, counters[events_[rank][e]].a_launch, e});
    }
    for (uint32_t peer = 0; peer < plans_.size(); ++peer) {
      if (peer == rank || plan.peers[rank].heap_words == 0) continue;
      end.signals.push_back(word_counter(peer, plan.peers[peer].credit_slot));
    }
    std::vector<Box>& mine = boxes_.emplace_back();
    for (const uint32_t t : plan.outputs) {
      const TensorRecord& tensor = plan.tensors[t];
      if (tensor.role != static_cast<uint32_t>(Role::kSymmetric) || tensor.rows * tensor.cols == 0) continue;
      mine.push_back(
          box_of({t, rank, 0, static_cast<uint32_t>(tensor.rows), 0, static_cast<uint32_t>(tensor.cols)}, t, false));
    }
  }

  Box box_of(const AccessRecord& access, uint32_t index, bool written) const {
    const TensorRecord& tensor = plans_[access.rank].tensors[access.tensor];
    const auto item = static_cast<uint64_t>(size_of(static_cast<DType>(tensor.dtype)));
    const auto role = static_cast<Role>(tensor.role);
    const bool placed = role == Role::kWorkspace || role == Role::kSymmetric;
    const uint64_t begin = placed ? tensor.offset : 0;
    return {{access.rank, placed ? tensor.role : kNone, placed ? kNone : tensor.storage},
            begin,
            begin + (access.row * tensor.cols + access.col) * item,
            tensor.cols * item,
            access.cols * item,
            access.rows,
            index,
            written};
  }

  void add_boxes(uint32_t rank, uint32_t number) {
    const Sections& plan = plans_[rank];
    const TaskRecord& task = plan.tasks[number];
    std::vector<Box>& mine = boxes_.emplace_back();
    for (uint32_t i = 0; i < task.access_count; ++i) {
      const uint32_t index = task.access_begin + i;
      const AccessRecord& access = plan.accesses[index];
      const TensorRecord& tensor = plans_[access.rank].tensors[access.tensor];
      if (uint64_t{access.row} + access.rows > tensor.rows || uint64_t{access.col} + access.cols > tensor.cols) {
        overflows.push_back({{rank, number, 0}, {rank, number, 0}, index, index});
      } else if (access.rows != 0 && access.cols != 0) {
        mine.push_back(box_of(access, index, i >= plan.ops[task.op].read_count));
      }
    }
  }

  void find_conflicts() {
    conflicts_.assign(tasks.size() * tasks.size(), 0);
    for (uint32_t a = 0; a < tasks.size(); ++a) {
      for (uint32_t b = 0; b < a; ++b) {
        for (const Box& one : boxes_[a]) {
          for (const Box& other : boxes_[b]) {
            if ((one.written || other.written) && share_bytes(one, other)) {
              conflicts_[size_t{a} * tasks.size() + b] = conflicts_[size_t{b} * tasks.size() + a] = 1;
            }
          }
        }
      }
    }
  }

  std::span<const Sections> plans_;
  std::vector<std::vector<uint32_t>> events_;                // [rank][event]: its counter
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> words_;  // (rank, word of its heap): its counter
  std::vector<uint32_t> tasks_ended_, launches_ended_;       // [rank]: the counters of those
  std::vector<std::vector<Box>> boxes_;                      // [task]
  std::vector<uint8_t> conflicts_;
};

}  // namespace hyper_mpmd::explore
