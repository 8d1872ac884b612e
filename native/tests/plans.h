// Plans made by hand for the native tests: small, readable, and with real data in them, so that a missing order shows.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "hyper_mpmd/kernels.h"
#include "hyper_mpmd/plan_image.h"

namespace plans {

using namespace hyper_mpmd;

// Puts tasks on queues in the order they are added; sections are laid out by build().
class Builder {
 public:
  Builder(uint32_t rank, uint32_t ranks, uint32_t queues) : queues_(queues) {
    image_.rank = rank;
    image_.ranks = ranks;
    image_.peers.assign(ranks, {0, 0});
  }

  uint32_t tensor(Role role, uint64_t rows, uint64_t cols, uint32_t dtype = 0) {
    const auto index = static_cast<uint32_t>(image_.tensors.size());
    uint64_t& end = role == Role::kSymmetric ? symmetric_ : workspace_;
    const bool held = role == Role::kSymmetric || role == Role::kWorkspace;
    image_.tensors.push_back(
        {dtype, static_cast<uint32_t>(role), index, static_cast<uint32_t>(rows), rows, cols, held ? end : 0});
    if (held) end += (rows * cols * 8 + kAlignment - 1) / kAlignment * kAlignment;
    return index;
  }

  uint32_t op(Kernel kernel, uint32_t reads) {
    image_.ops.push_back(
        {static_cast<uint32_t>(kernel), 1, 0, reads, 0, 0, std::bit_cast<uint32_t>(kernels::kNoLimit)});
    return static_cast<uint32_t>(image_.ops.size() - 1);
  }

  uint32_t event(uint32_t threshold) {
    image_.events.push_back({threshold, image_.rank, kNone, 0, 0, 0, 0, 0, 0, 0});
    return static_cast<uint32_t>(image_.events.size() - 1);
  }
  // Of a peer: after all local events. op: that put it; kNone for a credit.
  uint32_t remote_event(uint32_t peer, uint32_t slot, uint32_t op) {
    image_.events.push_back({1, peer, slot, op, 0, op == kNone ? kNone : 0, 0, 0, 0, 0});
    return static_cast<uint32_t>(image_.events.size() - 1);
  }
  void heaps(uint32_t words, uint32_t credit_slot) { image_.peers.assign(image_.ranks, {credit_slot, words}); }

  struct Task {
    uint32_t op;
    std::vector<AccessRecord> boxes;
    std::vector<WaitRecord> waits;
    std::vector<SignalRecord> signals;
    uint32_t launch = 0;
  };
  void add(uint32_t queue, Task task) { queues_[queue].push_back(std::move(task)); }

  PlanImage build() {
    std::vector<LaunchRecord> launches = launches_;
    if (launches.empty()) launches.push_back({kNone, 0, 0, 0, 0, 0});
    for (uint32_t q = 0; q < queues_.size(); ++q) {
      image_.queues.push_back(
          {2, q, static_cast<uint32_t>(image_.tasks.size()), static_cast<uint32_t>(queues_[q].size())});
      for (const Task& task : queues_[q]) {
        TaskRecord record{};
        record.op = task.op;
        record.number = static_cast<uint32_t>(image_.tasks.size());
        record.peer = task.boxes.empty() ? image_.rank : task.boxes.back().rank;
        record.launch = task.launch;
        append(image_.accesses, task.boxes, record.access_begin, record.access_count);
        append(image_.waits, task.waits, record.wait_begin, record.wait_count);
        append(image_.signals, task.signals, record.signal_begin, record.signal_count);
        ++launches[task.launch].task_count;
        image_.tasks.push_back(record);
      }
    }
    image_.launches = launches;
    return image_;
  }

  // O0: launch i waits for launch i - 1.
  void chain_of_launches(uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
      launches_.push_back({0, 0, static_cast<uint32_t>(image_.dependencies.size()), i ? 1u : 0u, 0, 0});
      if (i) image_.dependencies.push_back(i - 1);
    }
  }

  uint32_t rank() const { return image_.rank; }

 private:
  template <class Record>
  static void append(std::vector<Record>& all, const std::vector<Record>& some, uint32_t& begin, uint32_t& count) {
    begin = static_cast<uint32_t>(all.size());
    count = static_cast<uint32_t>(some.size());
    all.insert(all.end(), some.begin(), some.end());
  }

  PlanImage image_;
  std::vector<std::vector<Task>> queues_;
  std::vector<LaunchRecord> launches_;
  uint64_t workspace_ = 0, symmetric_ = 0;
};

// Row i of an output is copied from row i - 1 (row 0 from the input) by task i on queue i mod `queues`.
inline PlanImage chain(uint32_t length, uint32_t queues, uint32_t cols) {
  Builder b(0, 1, queues);
  const uint32_t x = b.tensor(Role::kInput, 1, cols), y = b.tensor(Role::kOutput, length, cols);
  const uint32_t copy = b.op(Kernel::kCopy, 1);
  for (uint32_t i = 0; i < length; ++i) {
    const AccessRecord from = i == 0 ? AccessRecord{x, 0, 0, 1, 0, cols} : AccessRecord{y, 0, i - 1, 1, 0, cols};
    Builder::Task task{copy, {from, {y, 0, i, 1, 0, cols}}, {}, {}};
    if (i > 0) task.waits.push_back({i - 1, 1});
    if (i + 1 < length) task.signals.push_back({0, b.event(1)});
    b.add(i % queues, std::move(task));
  }
  return b.build();
}

// A grid of copies: step s of column c copies what steps s - 1 of columns c and c + 1 wrote into its own row.
inline PlanImage grid(uint32_t steps, uint32_t columns, uint32_t queues) {
  Builder b(0, 1, queues);
  const uint32_t x = b.tensor(Role::kInput, 1, columns), y = b.tensor(Role::kOutput, steps, columns);
  const uint32_t copy = b.op(Kernel::kCopy, 1);
  for (uint32_t s = 0; s < steps; ++s) {
    for (uint32_t c = 0; c < columns; ++c) {
      const AccessRecord from = s == 0 ? AccessRecord{x, 0, 0, 1, c, 1} : AccessRecord{y, 0, s - 1, 1, c, 1};
      Builder::Task task{copy, {from, {y, 0, s, 1, c, 1}}, {}, {}};
      const uint32_t own = s * columns + c;
      if (s > 0) {
        task.waits.push_back({own - columns, c == 0 ? 1u : 2u});
        if (c + 1 < columns) task.waits.push_back({own - columns + 1, 2});
      }
      if (s + 1 < steps) {
        // Event `own`: signalled by this task and by its left neighbour of the same step, but for column 0.
        b.event(c == 0 ? 1 : 2);
        task.signals.push_back({0, own});
        if (c + 1 < columns) task.signals.push_back({0, own + 1});
      }
      b.add(c % queues, std::move(task));
    }
  }
  return b.build();
}

// Rank r of a ring: puts its input into the next rank's buffer, then copies what it received to its output. The put
// waits for the credit of the rank it writes to; the copy for the arrival.
inline PlanImage ring(uint32_t rank, uint32_t ranks, uint32_t cols) {
  // In each heap, two lines a source: its credit, then its arrivals.
  const uint32_t stride = 2 * kWordsPerLine;
  const uint32_t next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  Builder b(rank, ranks, 2);
  const uint32_t x = b.tensor(Role::kInput, 1, cols), box = b.tensor(Role::kSymmetric, 1, cols),
                 y = b.tensor(Role::kOutput, 1, cols);
  b.heaps(ranks * stride, rank * stride);
  const uint32_t copy = b.op(Kernel::kCopy, 1);
  const uint32_t arrival = b.remote_event(previous, previous * stride + kWordsPerLine, copy);
  std::vector<uint32_t> credit(ranks, 0);
  for (uint32_t peer = 0; peer < ranks; ++peer) {
    if (peer != rank) credit[peer] = b.remote_event(peer, peer * stride, kNone);
  }
  b.add(0, {copy,
            {{x, rank, 0, 1, 0, cols}, {box, next, 0, 1, 0, cols}},
            {{credit[next], 0}},
            {{next, rank * stride + kWordsPerLine}}});
  b.add(1, {copy, {{box, rank, 0, 1, 0, cols}, {y, rank, 0, 1, 0, cols}}, {{arrival, 1}}, {}});
  return b.build();
}

}  // namespace plans
