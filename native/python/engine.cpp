// hyper_mpmd._native.engine: plans in memory, their workspaces, and launches. No logic of its own.
#include "hyper_mpmd/engine.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace hyper_mpmd;

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class Record>
void fill(std::vector<Record>& records, const nb::dict& sections, const char* name) {
  const auto bytes = nb::cast<Bytes>(sections[name]);
  if (bytes.size() % sizeof(Record) != 0) throw std::invalid_argument(std::string(name) + ": not whole records");
  records.resize(bytes.size() / sizeof(Record));
  if (!records.empty()) std::memcpy(records.data(), bytes.data(), bytes.size());
}

std::shared_ptr<PlanImage> image_from(const nb::dict& sections, uint32_t rank, uint32_t ranks) {
  auto image = std::make_shared<PlanImage>();
  image->rank = rank;
  image->ranks = ranks;
  fill(image->ops, sections, "ops");
  fill(image->tensors, sections, "tensors");
  fill(image->tasks, sections, "tasks");
  fill(image->accesses, sections, "accesses");
  fill(image->waits, sections, "waits");
  fill(image->signals, sections, "signals");
  fill(image->events, sections, "events");
  fill(image->queues, sections, "queues");
  fill(image->launches, sections, "launches");
  fill(image->dependencies, sections, "dependencies");
  fill(image->peers, sections, "peers");
  return image;
}

// A plan that was found sound, with its workspace (made at the first launch, kept for the next).
struct Prepared {
  std::shared_ptr<PlanImage> image;
  std::unique_ptr<Workspace> workspace;
};

bool python_interrupted(void*) {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

bool python_task(void* context, uint32_t rank, uint32_t task) {
  const nb::gil_scoped_acquire gil;
  try {
    return nb::cast<bool>((*static_cast<nb::callable*>(context))(rank, task));
  } catch (const std::exception&) {
    return false;  // the callback keeps its own errors; this is one that it could not even report
  }
}

nb::tuple blocked_tuple(const BlockedCore& core) {
  return nb::make_tuple(core.rank, core.queue, core.task, core.event, core.have, core.need);
}

using Copies = std::vector<std::vector<std::pair<uint32_t, uintptr_t>>>;

nb::tuple launch_all(const std::vector<Prepared*>& plans, const std::vector<std::vector<uintptr_t>>& tensors,
                     const Copies& copies, const std::vector<uintptr_t>& traces, uint32_t workers, double timeout,
                     nb::callable on_task) {
  std::vector<RankLaunch> ranks;
  for (size_t r = 0; r < plans.size(); ++r) {
    Prepared& plan = *plans[r];
    if (!plan.workspace) plan.workspace = std::make_unique<Workspace>(*plan.image);
    std::vector<void*> memory;
    for (const uintptr_t address : tensors[r]) memory.push_back(reinterpret_cast<void*>(address));
    std::vector<RankLaunch::Copy> outputs;
    for (const auto& [tensor, target] : copies[r]) outputs.push_back({tensor, reinterpret_cast<void*>(target)});
    ranks.push_back({plan.image.get(), plan.workspace.get(), std::move(memory), std::move(outputs),
                     traces.empty() ? nullptr : reinterpret_cast<TraceRecord*>(traces[r])});
  }
  LaunchOptions options;
  options.workers = workers;
  options.timeout_s = timeout;
  options.context = &on_task;
  options.interrupted = python_interrupted;
  options.python_task = python_task;
  LaunchOutcome outcome;
  {
    const nb::gil_scoped_release released;
    outcome = launch(ranks, options);
  }
  if (outcome.status == LaunchStatus::kInterrupted) throw nb::python_error();
  nb::list blocked;
  for (const BlockedCore& core : outcome.blocked) blocked.append(blocked_tuple(core));
  return nb::make_tuple(static_cast<uint32_t>(outcome.status), outcome.rank, outcome.task, outcome.reason, blocked,
                        outcome.seconds);
}

// Memory of a tensor that the workspace holds.
uintptr_t address(Prepared& plan, uint32_t tensor) {
  if (tensor >= plan.image->tensors.size() || !plan.workspace) throw std::invalid_argument("no such memory");
  const TensorRecord& record = plan.image->tensors[tensor];
  const bool symmetric = record.role == static_cast<uint32_t>(Role::kSymmetric);
  return reinterpret_cast<uintptr_t>((symmetric ? plan.workspace->symmetric() : plan.workspace->workspace()) +
                                     record.offset);
}

}  // namespace

void hyper_mpmd::bind_engine(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("engine");
  nb::class_<Prepared>(m, "Prepared")
      .def("address", &address, "tensor"_a)
      .def("make_workspace",
           [](Prepared& plan, uint32_t start) {
             if (!plan.workspace) plan.workspace = std::make_unique<Workspace>(*plan.image, start);
           })
      .def_prop_ro("workspace_bytes",
                   [](const Prepared& plan) { return plan.image->workspace_bytes() + plan.image->symmetric_bytes(); });
  m.def(
      "prepare",
      [](const nb::dict& sections, uint32_t rank, uint32_t ranks) {
        auto plan = std::make_unique<Prepared>();
        plan->image = image_from(sections, rank, ranks);
        const std::string fault = [&] {
          const nb::gil_scoped_release released;
          return plan->image->fault();
        }();
        if (!fault.empty()) throw std::invalid_argument(fault);
        return plan;
      },
      "sections"_a, "rank"_a, "ranks"_a);
  m.def("world_fault", [](const std::vector<Prepared*>& plans) {
    std::vector<const PlanImage*> images;
    for (const Prepared* plan : plans) images.push_back(plan->image.get());
    return world_fault(images);
  });
  m.def("launch", &launch_all, "plans"_a, "tensors"_a, "copies"_a, "traces"_a, "workers"_a, "timeout"_a, "on_task"_a);
  m.def("set_processors", &set_processors);
  m.def("close", &close_engine, nb::call_guard<nb::gil_scoped_release>());
  m.def("worker_threads", &worker_threads);
}
