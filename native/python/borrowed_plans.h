// Plans whose sections numpy owns, read where they lie: what the prover and the simulator take.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <list>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "hyper_mpmd/plan_image.h"

namespace hyper_mpmd {

using Bytes = nanobind::ndarray<const uint8_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
// sections, rank, ranks, tensors that peers write and the caller gets
using GivenPlan = std::tuple<nanobind::dict, uint32_t, uint32_t, std::vector<uint32_t>>;

// Plans whose sections numpy owns. What is given must outlive it.
class BorrowedPlans {
 public:
  explicit BorrowedPlans(const std::vector<GivenPlan>& given) {
    for (const auto& [sections, rank, ranks, outputs] : given) {
      PlanView& plan = plans_.emplace_back();
      plan.outputs = outputs;
      plan.rank = rank;
      plan.ranks = ranks;
      plan.ops = take<OpRecord>(sections, "ops");
      plan.tensors = take<TensorRecord>(sections, "tensors");
      plan.tasks = take<TaskRecord>(sections, "tasks");
      plan.accesses = take<AccessRecord>(sections, "accesses");
      plan.waits = take<WaitRecord>(sections, "waits");
      plan.signals = take<SignalRecord>(sections, "signals");
      plan.events = take<EventRecord>(sections, "events");
      plan.queues = take<QueueRecord>(sections, "queues");
      plan.launches = take<LaunchRecord>(sections, "launches");
      plan.dependencies = take<uint32_t>(sections, "dependencies");
      plan.peers = take<PeerRecord>(sections, "peers");
    }
  }
  std::span<const PlanView> plans() const { return plans_; }

 private:
  template <class Record>
  std::span<const Record> take(const nanobind::dict& sections, const char* name) {
    const auto bytes = nanobind::cast<Bytes>(sections[name]);
    if (bytes.size() % sizeof(Record) != 0) throw std::invalid_argument(std::string(name) + ": not whole records");
    const size_t count = bytes.size() / sizeof(Record);
    if (reinterpret_cast<uintptr_t>(bytes.data()) % alignof(Record) == 0) {
      kept_.push_back(bytes);
      return {reinterpret_cast<const Record*>(bytes.data()), count};
    }
    // A section of a file lies where the one before it ended.
    auto& copy = copies_.emplace_back((bytes.size() + sizeof(uint64_t) - 1) / sizeof(uint64_t));
    std::memcpy(copy.data(), bytes.data(), bytes.size());
    return {reinterpret_cast<const Record*>(copy.data()), count};
  }

  std::vector<PlanView> plans_;
  std::vector<Bytes> kept_;
  std::list<std::vector<uint64_t>> copies_;
};

}  // namespace hyper_mpmd
