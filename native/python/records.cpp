// hyper_mpmd._native.records: the layout of plan.h as data, for the test that compares it with the numpy dtypes.
#include <nanobind/nanobind.h>

#include <cstddef>

#include "bind.h"
#include "hyper_mpmd/engine.h"
#include "hyper_mpmd/plan.h"

namespace nb = nanobind;

namespace hyper_mpmd {

namespace {

#define FIELD(Record, name) fields.append(nb::make_tuple(#name, offsetof(Record, name), sizeof(Record::name)))

// Every field of every record with its offset and size, for the test that compares them with the numpy dtypes.
nb::dict record_layouts() {
  nb::dict layouts;
  auto add = [&](const char* name, size_t size, nb::list fields) { layouts[name] = nb::make_tuple(size, fields); };
  {
    nb::list fields;
    FIELD(TaskRecord, op), FIELD(TaskRecord, number), FIELD(TaskRecord, group), FIELD(TaskRecord, peer);
    FIELD(TaskRecord, launch), FIELD(TaskRecord, access_begin), FIELD(TaskRecord, access_count);
    FIELD(TaskRecord, wait_begin), FIELD(TaskRecord, wait_count), FIELD(TaskRecord, signal_begin);
    FIELD(TaskRecord, signal_count), FIELD(TaskRecord, cost_ns), FIELD(TaskRecord, start_ns);
    FIELD(TaskRecord, end_ns);
    add("tasks", sizeof(TaskRecord), fields);
  }
  {
    nb::list fields;
    FIELD(AccessRecord, tensor), FIELD(AccessRecord, rank), FIELD(AccessRecord, row), FIELD(AccessRecord, rows);
    FIELD(AccessRecord, col), FIELD(AccessRecord, cols);
    add("accesses", sizeof(AccessRecord), fields);
  }
  {
    nb::list fields;
    FIELD(WaitRecord, event), FIELD(WaitRecord, threshold);
    add("waits", sizeof(WaitRecord), fields);
  }
  {
    nb::list fields;
    FIELD(SignalRecord, rank), FIELD(SignalRecord, event);
    add("signals", sizeof(SignalRecord), fields);
  }
  {
    nb::list fields;
    FIELD(EventRecord, threshold), FIELD(EventRecord, signaller), FIELD(EventRecord, slot), FIELD(EventRecord, op);
    FIELD(EventRecord, order), FIELD(EventRecord, tensor), FIELD(EventRecord, row), FIELD(EventRecord, rows);
    FIELD(EventRecord, col), FIELD(EventRecord, cols);
    add("events", sizeof(EventRecord), fields);
  }
  {
    nb::list fields;
    FIELD(QueueRecord, kind), FIELD(QueueRecord, core), FIELD(QueueRecord, begin), FIELD(QueueRecord, count);
    add("queues", sizeof(QueueRecord), fields);
  }
  {
    nb::list fields;
    FIELD(LaunchRecord, op), FIELD(LaunchRecord, task_count), FIELD(LaunchRecord, dependency_begin);
    FIELD(LaunchRecord, dependency_count), FIELD(LaunchRecord, start_ns), FIELD(LaunchRecord, end_ns);
    add("launches", sizeof(LaunchRecord), fields);
  }
  {
    nb::list fields;
    FIELD(OpRecord, kernel), FIELD(OpRecord, kind), FIELD(OpRecord, dtype), FIELD(OpRecord, read_count);
    FIELD(OpRecord, hop), FIELD(OpRecord, route), FIELD(OpRecord, limit_bits);
    add("ops", sizeof(OpRecord), fields);
  }
  {
    nb::list fields;
    FIELD(TensorRecord, dtype), FIELD(TensorRecord, role), FIELD(TensorRecord, storage);
    FIELD(TensorRecord, most_rows), FIELD(TensorRecord, rows), FIELD(TensorRecord, cols), FIELD(TensorRecord, offset);
    add("tensors", sizeof(TensorRecord), fields);
  }
  {
    nb::list fields;
    FIELD(CoreRecord, rank), FIELD(CoreRecord, queue), FIELD(CoreRecord, kind), FIELD(CoreRecord, core);
    FIELD(CoreRecord, worker), FIELD(CoreRecord, state), FIELD(CoreRecord, task), FIELD(CoreRecord, event);
    FIELD(CoreRecord, have), FIELD(CoreRecord, need), FIELD(CoreRecord, ended), FIELD(CoreRecord, tasks);
    FIELD(CoreRecord, launch), FIELD(CoreRecord, elapsed_ns);
    add("cores", sizeof(CoreRecord), fields);
  }
  {
    nb::list fields;
    FIELD(PeerRecord, credit_slot), FIELD(PeerRecord, heap_words);
    add("peers", sizeof(PeerRecord), fields);
  }
  return layouts;
}

#undef FIELD

nb::dict constants() {
  nb::dict found;
  found["PLAN_VERSION"] = kPlanVersion;
  found["NONE"] = kNone;
  found["MAX_INDEX"] = kMaxIndex;
  found["MAX_THRESHOLD"] = kMaxThreshold;
  found["MAX_RANKS"] = kMaxRanks;
  found["MAX_WORK"] = kMaxWork;
  found["MAX_TIME"] = kMaxTime;
  found["MAX_BYTES"] = kMaxBytes;
  found["ALIGNMENT"] = kAlignment;
  found["WORDS_PER_LINE"] = kWordsPerLine;
  found["AIC"] = static_cast<uint32_t>(CoreKind::kAic);
  found["AIV"] = static_cast<uint32_t>(CoreKind::kAiv);
  found["BOTH"] = static_cast<uint32_t>(CoreKind::kBoth);
  nb::dict kernels;
  kernels["nop"] = static_cast<uint32_t>(Kernel::kNop);
  kernels["python"] = static_cast<uint32_t>(Kernel::kPython);
  kernels["copy"] = static_cast<uint32_t>(Kernel::kCopy);
  kernels["permute"] = static_cast<uint32_t>(Kernel::kPermute);
  kernels["gemm"] = static_cast<uint32_t>(Kernel::kGemm);
  kernels["swiglu"] = static_cast<uint32_t>(Kernel::kSwiGLU);
  kernels["unpermute"] = static_cast<uint32_t>(Kernel::kUnpermute);
  kernels["gemm_wt"] = static_cast<uint32_t>(Kernel::kGemmWT);
  kernels["gemm_xt"] = static_cast<uint32_t>(Kernel::kGemmXT);
  kernels["weighted_swiglu"] = static_cast<uint32_t>(Kernel::kWeightedSwiGLU);
  kernels["swiglu_grad"] = static_cast<uint32_t>(Kernel::kSwiGLUGrad);
  kernels["gather_sum"] = static_cast<uint32_t>(Kernel::kGatherSum);
  found["KERNELS"] = kernels;
  nb::dict roles;
  roles["input"] = static_cast<uint32_t>(Role::kInput);
  roles["output"] = static_cast<uint32_t>(Role::kOutput);
  roles["workspace"] = static_cast<uint32_t>(Role::kWorkspace);
  roles["symmetric"] = static_cast<uint32_t>(Role::kSymmetric);
  found["ROLES"] = roles;
  return found;
}

}  // namespace

void bind_records(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("records", "The layout of native/include/hyper_mpmd/plan.h.");
  m.def("record_layouts", &record_layouts);
  m.def("constants", &constants);
}

}  // namespace hyper_mpmd
