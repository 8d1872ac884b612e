// hyper_mpmd._native.prover: proofs over the sections of plans, which are read where they lie. No logic of its own.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind.h"
#include "borrowed_plans.h"
#include "hyper_mpmd/prove.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace hyper_mpmd;

nb::tuple to_python(const RaceFault::Access& access) {
  return nb::make_tuple(access.rank, access.task, access.tensor, access.written);
}

nb::dict prove(const std::vector<GivenPlan>& given) {
  const BorrowedPlans borrowed(given);
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

std::string certificate(const GivenPlan& given, bool hops) {
  const std::vector<GivenPlan> one{given};
  const BorrowedPlans borrowed(one);
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
