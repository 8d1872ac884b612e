// What policies read of a program.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "hyper_mpmd/planner.h"

namespace hyper_mpmd::planner {

// When events of other ranks may be expected: as far along as this rank is with its own tasks of the same op.
class Arrivals {
 public:
  Arrivals(const ProgramView& program, const Device& device)
      : program_(program), device_(device), named_(program.ops.size(), false), ends_(program.ops.size()) {
    for (size_t e = static_cast<size_t>(program.local_events); e < program.events.size(); ++e) {
      if (program.events[e].op != kNone) named_[program.events[e].op] = true;
    }
  }

  // Take the ends of this rank's own tasks of an op, in order of their numbers.
  void add(uint32_t op, int64_t end) {
    if (!named_[op]) return;
    auto& ends = ends_[op];
    ends.push_back(ends.empty() ? end : std::max(ends.back(), end));
  }

  // Whether this rank has done what tells when the event's box is sent.
  bool known(uint32_t event) const {
    const uint32_t op = program_.events[event].op;
    return op != kNone && !ends_[op].empty();
  }

  int64_t time(uint32_t event) const {
    const EventRecord& record = program_.events[event];
    if (record.op == kNone) return 0;  // a credit is due from the launch before
    const auto& ends = ends_[record.op];
    return (ends.empty() ? 0 : ends[std::min<size_t>(record.order, ends.size() - 1)]) + device_.remote_ns;
  }

 private:
  const ProgramView& program_;
  const Device& device_;
  std::vector<bool> named_;  // [op] whether events of other ranks are of it
  std::vector<std::vector<int64_t>> ends_;
};

// Lists of numbers by key, made by counting.
struct Groups {
  std::vector<uint32_t> begins, items;

  template <class EachPair>  // each_pair(f) calls f(key, item) for every pair, twice over, in the same order
  Groups(size_t keys, EachPair&& each_pair) : begins(keys + 1, 0) {
    each_pair([&](uint32_t key, uint32_t) { ++begins[key + 1]; });
    for (size_t key = 0; key < keys; ++key) begins[key + 1] += begins[key];
    items.resize(begins[keys]);
    std::vector<uint32_t> next(begins.begin(), begins.end() - 1);
    each_pair([&](uint32_t key, uint32_t item) { items[next[key]++] = item; });
  }
  std::span<const uint32_t> operator[](size_t key) const {
    return std::span(items).subspan(begins[key], begins[key + 1] - begins[key]);
  }
};

// Ops that have tasks: which signal what others wait for, and waves of those that do not wait for one another.
struct OpOrder {
  explicit OpOrder(const ProgramView& program);  // throws Cycle where an op waits for itself or for a later one

  Groups tasks_of;                            // by op
  std::vector<std::vector<uint32_t>> before;  // by op: the ops whose tasks signal what its tasks wait for
  std::vector<std::vector<uint32_t>> waves;   // by hop level, then by the length of the path to them within it
};

// Throws PlanLimit for a program whose times could leave 64 bits.
void check_times(const ProgramView& program, const Device& device);

}  // namespace hyper_mpmd::planner
