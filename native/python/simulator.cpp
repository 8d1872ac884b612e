// hyper_mpmd._native.simulator: simulation of plans whose sections and results numpy owns. No logic of its own.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "borrowed_plans.h"
#include "hyper_mpmd/simulate.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace hyper_mpmd;

using Results = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::tuple simulate(const std::vector<GivenPlan>& given, const std::vector<std::vector<uint64_t>>& gathered,
                   const std::vector<int64_t>& rates, const std::vector<int64_t>& times,
                   const std::vector<std::pair<int64_t, int64_t>>& near, uint64_t seed, uint32_t jitter_ppm, bool path,
                   const std::vector<Results>& results) {
  const BorrowedPlans borrowed(given);
  const SimulatedDevice device{rates.at(0), rates.at(1), rates.at(2), rates.at(3), rates.at(4),
                               times.at(0), times.at(1), times.at(2), times.at(3), near};
  std::vector<std::span<SimulatedTask>> tasks;
  for (size_t i = 0; i < borrowed.plans().size(); ++i) {
    if (results.at(i).size() != borrowed.plans()[i].tasks.size() * sizeof(SimulatedTask) ||
        gathered.at(i).size() != borrowed.plans()[i].ops.size()) {
      throw std::invalid_argument("results or gathered reads do not fit the plan");
    }
    tasks.emplace_back(reinterpret_cast<SimulatedTask*>(results[i].data()), borrowed.plans()[i].tasks.size());
  }
  SimulateFault fault;
  {
    const nb::gil_scoped_release released;
    fault = simulate_plans(borrowed.plans(), gathered, device, {seed, jitter_ppm, path}, tasks);
  }
  return nb::make_tuple(fault.record, fault.stuck, fault.rank, fault.task);
}

}  // namespace

void hyper_mpmd::bind_simulator(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("simulator");
  m.def("layout", [] {  // for the test that compares it with the numpy dtype
    using Task = SimulatedTask;
    return std::vector<size_t>{offsetof(Task, blocked_ns), offsetof(Task, ready_ns), offsetof(Task, start_ns),
                               offsetof(Task, end_ns),     offsetof(Task, core_ns),  offsetof(Task, memory_bytes),
                               offsetof(Task, held),       offsetof(Task, reserved), sizeof(Task)};
  });
  m.def("simulate", &simulate, "plans"_a, "gathered"_a, "rates"_a, "times"_a, "near"_a, "seed"_a, "jitter_ppm"_a,
        "path"_a, "results"_a);
}
