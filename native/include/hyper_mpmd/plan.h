// The records of a plan: plain structs in one place, read by the CPU engine, the prover, the simulator and an NPU
// kernel. hyper_mpmd/scheduler/records.py mirrors them as numpy dtypes; tests/scheduler/test_records.py compares every
// offset.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hyper_mpmd {

inline constexpr uint32_t kPlanVersion = 2;
inline constexpr uint32_t kNone = 0xffffffffu;  // "no such thing" in any index field
// Indices are 32-bit; counters are compared by signed 32-bit difference, so no threshold may reach half their range.
inline constexpr uint64_t kMaxIndex = 0xfffffffeu;
inline constexpr uint32_t kMaxThreshold = 0x3fffffffu;
inline constexpr uint32_t kMaxRanks = 4096;
inline constexpr uint64_t kMaxWork = uint64_t{1} << 52;   // operations, or bytes moved, of one tile
inline constexpr uint64_t kMaxTime = uint64_t{1} << 62;   // nanoseconds of all tasks of a rank together
inline constexpr uint64_t kMaxBytes = uint64_t{1} << 62;  // of a tensor, and of all tensors of one role
inline constexpr uint64_t kAlignment = 64;                // bytes: tensors in a workspace, lines that one rank writes
// The counters that rank s writes in rank r's heap: first a line with its credit, then one counter a row tile.
inline constexpr uint32_t kWordsPerLine = 16;

enum class CoreKind : uint32_t { kAic = 0, kAiv = 1, kBoth = 2 };
enum class Kernel : uint32_t {
  kNop = 0,
  kPython = 1,
  kCopy = 2,
  kPermute = 3,
  kGemm = 4,
  kSwiGLU = 5,
  kUnpermute = 6,
  kGemmWT = 7,  // the second factor transposed
  kGemmXT = 8,  // the first factor transposed
  kWeightedSwiGLU = 9,
  kSwiGLUGrad = 10,
  kGatherSum = 11,
};
inline constexpr uint32_t kKernelCount = 12;
enum class Role : uint32_t { kInput = 0, kOutput = 1, kWorkspace = 2, kSymmetric = 3 };

// One tile task. Tasks of one queue stand side by side, in queue order.
struct TaskRecord {
  uint32_t op;            // index into the ops
  uint32_t number;        // tile number within the op on this rank
  uint32_t group;         // group of the row space (expert), 0 where the op is not cut by group
  uint32_t peer;          // rank whose tensor is written: this rank, or the destination of a put
  uint32_t launch;        // index into the launches
  uint32_t access_begin;  // boxes: the inputs' first, then the outputs', in the order of the op's tile rule
  uint32_t access_count;
  uint32_t wait_begin;
  uint32_t wait_count;
  uint32_t signal_begin;
  uint32_t signal_count;
  uint32_t cost_ns;  // predicted, saturated
  int64_t start_ns;  // predicted, from the start of the plan
  int64_t end_ns;
};
static_assert(sizeof(TaskRecord) == 64);

// A box: rows and columns of a tensor seen as a matrix, on one rank.
struct AccessRecord {
  uint32_t tensor;
  uint32_t rank;
  uint32_t row;
  uint32_t rows;
  uint32_t col;
  uint32_t cols;
};
static_assert(sizeof(AccessRecord) == 24);

// Wait until the event has grown by `threshold` since this launch's base.
struct WaitRecord {
  uint32_t event;  // index into the events
  uint32_t threshold;
};
static_assert(sizeof(WaitRecord) == 8);

struct SignalRecord {
  uint32_t rank;  // this rank: `event` is an index into the events; a peer: a slot of the peer's heap
  uint32_t event;
};
static_assert(sizeof(SignalRecord) == 8);

// "The box is ready". Local events come first; an event of another rank names its slot in this rank's heap.
struct EventRecord {
  uint32_t threshold;  // signals in one launch
  uint32_t signaller;  // rank
  uint32_t slot;       // word in this rank's heap, kNone for a local event
  uint32_t op;         // the op whose tasks signal it; kNone for a credit
  uint32_t order;      // of another rank's put: its place among that rank's tiles of the op
  uint32_t tensor;     // the box that is ready; kNone for a credit
  uint32_t row;
  uint32_t rows;
  uint32_t col;
  uint32_t cols;
};
static_assert(sizeof(EventRecord) == 40);

// One in-order queue: tasks [begin, begin + count) run on this core.
struct QueueRecord {
  uint32_t kind;  // CoreKind
  uint32_t core;  // number among the cores of its kind
  uint32_t begin;
  uint32_t count;
};
static_assert(sizeof(QueueRecord) == 16);

// O0: one launch an op, which starts when the launches it waits for have ended. O1: one launch.
struct LaunchRecord {
  uint32_t op;  // kNone: the launch holds all ops
  uint32_t task_count;
  uint32_t dependency_begin;  // index into the dependencies, each an index of an earlier launch
  uint32_t dependency_count;
  int64_t start_ns;
  int64_t end_ns;
};
static_assert(sizeof(LaunchRecord) == 32);

struct OpRecord {
  uint32_t kernel;
  uint32_t kind;        // CoreKind
  uint32_t dtype;       // of the output
  uint32_t read_count;  // how many of a task's boxes are read; the rest are written
  uint32_t hop;         // the most cross-rank edges on a path to it
  uint32_t route;       // 0: not a communication op
  uint32_t limit_bits;  // of the float32 that SwiGLU clamps its halves to; infinity: nothing
};
static_assert(sizeof(OpRecord) == 28);

struct TensorRecord {
  uint32_t dtype;
  uint32_t role;       // Role
  uint32_t storage;    // the tensor whose memory this one shares (an in-place op); itself otherwise
  uint32_t most_rows;  // rows of the rank that has most, where peers write it; else as rows
  uint64_t rows;
  uint64_t cols;
  uint64_t offset;  // bytes from the start of the workspace, or of the symmetric buffers; 0 for inputs and outputs
};
static_assert(sizeof(TensorRecord) == 40);

// What this rank needs to know of each rank to give it credit.
struct PeerRecord {
  uint32_t credit_slot;  // the word in the peer's heap that this rank raises when it has finished a launch
  uint32_t heap_words;   // of the peer
};
static_assert(sizeof(PeerRecord) == 8);

}  // namespace hyper_mpmd
