// hyper_mpmd._native.explore: the explorer of small worlds; see hyper_mpmd.testing.explore.
#include "hyper_mpmd/explore.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

namespace ex = hyper_mpmd::explore;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class Record>
void borrow(std::span<const Record>& records, const Bytes& bytes) {
  if (bytes.size() % sizeof(Record) != 0) throw std::invalid_argument("a section that is not whole records");
  records = {reinterpret_cast<const Record*>(bytes.data()), bytes.size() / sizeof(Record)};
}

nb::tuple moment(const ex::Moment& m) { return nb::make_tuple(m.rank, m.task, m.launch); }

// sections: of each rank, in the order of hyper_mpmd.scheduler.records.SECTIONS; outputs: its tensors that the caller
// gets.
nb::dict explore_world(const std::vector<std::vector<Bytes>>& sections,
                       const std::vector<std::vector<uint32_t>>& outputs, uint32_t launches, uint64_t cap,
                       bool by_pairs) {
  std::vector<ex::Sections> world;
  if (outputs.size() != sections.size()) throw std::invalid_argument("outputs: one list a rank");
  for (const std::vector<Bytes>& plan : sections) {
    if (plan.size() != 11) throw std::invalid_argument("a plan has 11 sections");
    ex::Sections& made = world.emplace_back();
    made.outputs = outputs[world.size() - 1];
    borrow(made.ops, plan[0]);
    borrow(made.tensors, plan[1]);
    borrow(made.tasks, plan[2]);
    borrow(made.accesses, plan[3]);
    borrow(made.waits, plan[4]);
    borrow(made.signals, plan[5]);
    borrow(made.events, plan[6]);
    borrow(made.queues, plan[7]);
    borrow(made.launches, plan[8]);
    borrow(made.dependencies, plan[9]);
    borrow(made.peers, plan[10]);
  }
  ex::Verdict verdict;
  {
    const nb::gil_scoped_release released;
    verdict = ex::explore(world, launches, cap, by_pairs ? ex::Method::kPairs : ex::Method::kStates);
  }
  nb::list ended, stuck, stale, clashes;
  for (const ex::Moment& m : verdict.ended) ended.append(moment(m));
  for (const ex::Stuck& s : verdict.stuck) {
    stuck.append(nb::make_tuple(moment(s.next), s.event, s.launch_record, s.have, s.need));
  }
  for (const ex::Stale& s : verdict.stale) stale.append(nb::make_tuple(s.rank, s.event, s.word, s.have, s.need));
  for (const ex::Clash& c : verdict.clashes) {
    clashes.append(nb::make_tuple(moment(c.first), moment(c.second), c.first_access, c.second_access));
  }
  nb::dict found;
  found["kind"] = static_cast<uint32_t>(verdict.kind);
  found["states"] = verdict.states;
  found["ended"] = ended;
  found["stuck"] = stuck;
  found["stale"] = stale;
  found["clashes"] = clashes;
  return found;
}

}  // namespace

void hyper_mpmd::bind_explore(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("explore", "Every order in which a small world can run.");
  m.def("explore", &explore_world, "sections"_a, "outputs"_a, "launches"_a, "cap"_a, "by_pairs"_a);
}
