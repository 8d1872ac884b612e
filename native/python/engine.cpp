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
#include <optional>

#include "bind.h"
#include "shmem_bound.h"

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

// A plan that was found sound, and the workspace that it runs in unless the caller brings one.
struct Prepared {
  std::shared_ptr<PlanImage> image;
  std::shared_ptr<Workspace> workspace = std::make_shared<Workspace>();
};

// The ranks of a group, one process each: where in the symmetric heap their buffers and counters lie.
struct Group {
  Group(shmem::Bound& bound, uint64_t symmetric_offset, uint64_t symmetric_bytes, uint64_t words_offset,
        uint64_t word_count)
      : bound(bound) {
    shmem::SymmetricHeap& heap = bound.heap();
    const uint64_t bytes = heap.heap_bytes(), words_bytes = word_count * sizeof(uint32_t);
    if (symmetric_bytes > bytes || symmetric_offset > bytes - symmetric_bytes || words_bytes > bytes ||
        words_offset > bytes - words_bytes) {
      throw std::out_of_range("the group's buffers leave the heap");
    }
    peers.heap = &heap;
    for (int peer = 0; peer < heap.world(); ++peer) {
      peers.symmetric.push_back(heap.base(peer) + symmetric_offset);
      peers.words.push_back(reinterpret_cast<uint32_t*>(heap.base(peer) + words_offset));
    }
    peers.stride = word_count / static_cast<uint64_t>(heap.world());
    const auto rank = static_cast<size_t>(heap.rank());
    workspace.attach(peers.symmetric[rank], symmetric_bytes, peers.words[rank], word_count);
  }

  shmem::Bound& bound;
  Peers peers;
  Workspace workspace;
};

bool python_interrupted(void*) {
  const nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

// A worker's Python thread state, made at its first Python task and kept until the worker ends. To make and delete one
// takes a lock of CPython without the GIL, and a child forked while a worker holds it hangs inside os.fork() (CPython
// 3.11); besides, it costs more than the call.
class WorkerPython {
 public:
  void keep() {
    if (kept_ != nullptr) return;
    before_ = PyGILState_Ensure();
    kept_ = PyEval_SaveThread();
  }
  ~WorkerPython() {
    if (kept_ == nullptr || Py_IsInitialized() == 0) return;
    PyEval_RestoreThread(kept_);
    PyGILState_Release(before_);
  }

 private:
  PyThreadState* kept_ = nullptr;
  PyGILState_STATE before_ = PyGILState_UNLOCKED;
};

bool python_task(void* context, uint32_t rank, uint32_t task) {
  static thread_local WorkerPython python;
  python.keep();
  const nb::gil_scoped_acquire gil;
  try {
    return nb::cast<bool>((*static_cast<nb::callable*>(context))(rank, task));
  } catch (const std::exception&) {
    return false;  // the callback keeps its own errors; this is one that it could not even report
  }
}

// Records as bytes, which numpy reads without a copy.
nb::bytes bytes_of(const std::vector<CoreRecord>& cores) {
  return nb::bytes(cores.data(), cores.size() * sizeof(CoreRecord));
}

// What a launch must not lose: the objects that its plans, memory and kernels live in, and the heap as it is mapped.
struct Kept {
  nb::object objects;
  nb::callable on_task;
  std::optional<shmem::Bound::Use> use;
};

// The last owner may be a thread without the GIL.
void drop(Kept* kept) {
  if (Py_IsInitialized() == 0) return;
  const nb::gil_scoped_acquire gil;
  delete kept;
}

using Copies = std::vector<std::vector<std::pair<uint32_t, uintptr_t>>>;

nb::tuple launch_all(const std::vector<Prepared*>& plans, const std::vector<Workspace*>& workspaces, Group* group,
                     const std::vector<std::vector<uintptr_t>>& tensors, const Copies& copies,
                     const std::vector<uintptr_t>& traces, uint32_t workers, double timeout, nb::callable on_task,
                     nb::object keep) {
  std::vector<RankLaunch> ranks;
  for (size_t r = 0; r < plans.size(); ++r) {
    Prepared& plan = *plans[r];
    std::vector<void*> memory;
    for (const uintptr_t address : tensors[r]) memory.push_back(reinterpret_cast<void*>(address));
    std::vector<RankLaunch::Copy> outputs;
    for (const auto& [tensor, target] : copies[r]) outputs.push_back({tensor, reinterpret_cast<void*>(target)});
    Workspace* workspace = group != nullptr     ? &group->workspace
                           : workspaces.empty() ? plan.workspace.get()
                                                : workspaces[r];
    ranks.push_back({plan.image.get(), workspace, std::move(memory), std::move(outputs),
                     traces.empty() ? nullptr : reinterpret_cast<TraceRecord*>(traces[r])});
  }
  LaunchOptions options;
  options.workers = workers;
  options.timeout_s = timeout;
  const std::shared_ptr<Kept> kept(new Kept{std::move(keep), std::move(on_task), std::nullopt}, drop);
  if (group != nullptr) kept->use.emplace(group->bound);
  options.context = &kept->on_task;
  options.keep = kept;
  options.peers = group != nullptr ? &group->peers : nullptr;
  options.interrupted = python_interrupted;
  options.python_task = python_task;
  LaunchOutcome outcome;
  {
    const nb::gil_scoped_release released;
    outcome = launch(std::move(ranks), options);
  }
  // Between processes the caller tells its peers first, then raises what the signal's handler raised.
  nb::object raised = nb::none();
  if (outcome.status == LaunchStatus::kInterrupted) {
    nb::python_error error;
    if (group == nullptr) throw error;
    raised = nb::borrow(error.value());
  }
  const auto* hung = static_cast<const Kept*>(outcome.hung.get());
  return nb::make_tuple(static_cast<uint32_t>(outcome.status), outcome.rank, outcome.task, outcome.reason,
                        bytes_of(outcome.cores), bytes_of(outcome.stuck), outcome.seconds, raised,
                        hung == nullptr ? nb::none() : hung->objects);
}

// Memory of a tensor that a workspace holds, while the plan runs in it.
uintptr_t address(Workspace& workspace, const Prepared& plan, uint32_t tensor) {
  if (tensor >= plan.image->tensors.size()) throw std::invalid_argument("no such tensor");
  const TensorRecord& record = plan.image->tensors[tensor];
  const bool symmetric = record.role == static_cast<uint32_t>(Role::kSymmetric);
  return reinterpret_cast<uintptr_t>((symmetric ? workspace.symmetric() : workspace.workspace()) + record.offset);
}

std::unique_ptr<Prepared> prepare(const nb::dict& sections, uint32_t rank, uint32_t ranks, uint64_t stride,
                                  uint64_t symmetric_bytes, bool hops) {
  auto plan = std::make_unique<Prepared>();
  plan->image = image_from(sections, rank, ranks);
  std::string fault;
  {
    const nb::gil_scoped_release released;
    fault = plan->image->fault(hops);
    if (fault.empty() && stride != 0) fault = plan->image->spread(stride, symmetric_bytes);
  }
  if (!fault.empty()) throw std::invalid_argument(fault);
  return plan;
}

}  // namespace

void hyper_mpmd::bind_engine(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("engine");
  nb::class_<Workspace>(m, "Workspace").def(nb::init<uint32_t>(), "start"_a = 0).def("address", &address);
  nb::class_<Prepared>(m, "Prepared")
      .def_prop_ro(
          "workspace", [](Prepared& plan) -> Workspace& { return *plan.workspace; }, nb::rv_policy::reference_internal)
      .def_prop_ro("symmetric_bytes", [](const Prepared& plan) { return plan.image->symmetric_bytes(); });
  nb::class_<Group>(m, "Group")
      .def(nb::init<shmem::Bound&, uint64_t, uint64_t, uint64_t, uint64_t>(), "heap"_a, "symmetric_offset"_a,
           "symmetric_bytes"_a, "words_offset"_a, "word_count"_a, nb::keep_alive<1, 2>())
      .def_prop_ro(
          "workspace", [](Group& group) -> Workspace& { return group.workspace; }, nb::rv_policy::reference_internal)
      .def("enter", [](Group& group, uint64_t epoch, uint64_t tag, double timeout) {
        group.peers.epoch = epoch;
        group.peers.tag = tag;
        group.peers.entry_timeout_s = timeout;
      });
  m.def("prepare", &prepare, "sections"_a, "rank"_a, "ranks"_a, "stride"_a = 0, "symmetric_bytes"_a = 0,
        "hops"_a = true);
  m.def("world_fault", [](const std::vector<Prepared*>& plans) {
    std::vector<const PlanImage*> images;
    for (const Prepared* plan : plans) images.push_back(plan->image.get());
    return world_fault(images);
  });
  m.def("launch", &launch_all, "plans"_a, "workspaces"_a, "group"_a.none(), "tensors"_a, "copies"_a, "traces"_a,
        "workers"_a, "timeout"_a, "on_task"_a, "keep"_a.none());
  m.def(
      "set_adversity",
      [](uint64_t seed, bool incoherent, bool poll_cached, uint32_t rank, uint32_t task, uint32_t signal) {
        set_adversity({seed, incoherent, poll_cached, rank, task, signal});
      },
      "seed"_a = 0, "incoherent"_a = false, "poll_cached"_a = false, "drop_rank"_a = kNone, "drop_task"_a = kNone,
      "drop_signal"_a = kNone);
  m.def("set_processors", &set_processors);
  m.def("close", &close_engine, nb::call_guard<nb::gil_scoped_release>());
  m.def("settled", &settled, nb::call_guard<nb::gil_scoped_release>());
  m.def("worker_threads", &worker_threads);
}
