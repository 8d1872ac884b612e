// hyper_mpmd._native.prover: proofs over the sections of plans, which are read where they lie. No logic of its own.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <list>
#include <vector>

#include "bind.h"
#include "hyper_mpmd/prove.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace hyper_mpmd;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
// sections, rank, ranks, tensors that peers write and the caller gets
using Given = std::tuple<nb::dict, uint32_t, uint32_t, std::vector<uint32_t>>;

// Plans whose sections numpy owns. What is given must outlive it.
class Borrowed {
 public:
  explicit Borrowed(const std::vector<Given>& given) {
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
  std::span<const Record> take(const nb::dict& sections, const char* name) {
    const auto bytes = nb::cast<Bytes>(sections[name]);
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

nb::tuple to_python(const RaceFault::Access& access) {
  return nb::make_tuple(access.rank, access.task, access.tensor, access.written);
}

nb::dict prove(const std::vector<Given>& given) {
  const Borrowed borrowed(given);
  Verdict verdict;
  {
    const nb::gil_scoped_release released;
    verdict = prove_plans(borrowed.plans());
  }
  nb::dict found;
  found["unsafe"] = static_cast<uint32_t>(verdict.unsafe);
  found["text"] = verdict.text;
  const SignalFault& s = verdict.signal;
  found["signal"] = nb::make_tuple(static_cast<uint32_t>(s.why), s.rank, s.event, s.task_rank, s.task, s.have, s.need);
  nb::list circle;
  for (const Standing& at : verdict.circle) {
    circle.append(
        nb::make_tuple(at.rank, at.queue, at.task, at.event, at.have, at.need, at.signaller_rank, at.signaller));
  }
  found["circle"] = circle;
  const RaceFault& r = verdict.race;
  found["race"] = nb::make_tuple(to_python(r.first), to_python(r.second), r.next_launch, r.memory_rank, r.row, r.rows,
                                 r.col, r.cols);
  found["counts"] = nb::make_tuple(verdict.queues, verdict.tasks, verdict.events, verdict.edges, verdict.boxes,
                                   verdict.pairs, verdict.bytes);
  return found;
}

std::string certificate(const Given& given, bool hops) {
  const std::vector<Given> one{given};
  const Borrowed borrowed(one);
  const nb::gil_scoped_release released;
  const PlanView& plan = borrowed.plans()[0];
  std::string what = plan.record_fault();
  return what.empty() ? certificate_fault(plan, hops) : what;
}

}  // namespace

void hyper_mpmd::bind_prover(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("prover");
  m.def("prove", &prove, "plans"_a);
  m.def("certificate", &certificate, "plan"_a, "hops"_a = true);
}
