// The CPU engine: persistent worker threads that run any plan, or the plans of a world, on any number of workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hyper_mpmd/plan_image.h"
#include "hyper_mpmd/shmem_heap.h"
#include "hyper_mpmd/worker_loop.h"

namespace hyper_mpmd {

// When a task began to be waited for, started and ended: nanoseconds of a monotonic clock; and which worker ran it.
struct TraceRecord {
  int64_t blocked_ns;
  int64_t start_ns;
  int64_t end_ns;
  uint32_t worker;
  uint32_t reserved;
};
static_assert(sizeof(TraceRecord) == 32);

// What one rank keeps between launches, of one plan or of one plan after another: buffers, and counters that only grow.
// Its memory grows to what the largest plan needed.
class Workspace {
 public:
  // Counters start at `start`: a test begins near the wrap-around.
  explicit Workspace(uint32_t start = 0) : start_(start) {}

  // Symmetric memory that others own (a heap between processes) instead of memory of its own: `words` counters, zeroed.
  void attach(std::byte* symmetric, uint64_t symmetric_bytes, uint32_t* words, uint64_t word_count);

  // Room for the plan. Throws std::bad_alloc; std::length_error where attached memory is too small.
  void fit(const PlanImage& image);

  std::byte* workspace() { return workspace_.get(); }
  std::byte* symmetric() { return attached_ ? symmetric_ : own_symmetric_.get(); }
  uint32_t* words() { return words_; }
  EventCell* cells() { return cells_.data(); }
  const uint32_t* word_base() const { return word_base_.data(); }

  void launched(const PlanImage& image);  // a launch went well: the thresholds are added to the bases
  void reset(uint32_t start);             // after a failed launch: counters and bases agree again
  bool of_this_process() const;           // false in a forked child, which must reset before its first launch

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  using Memory = std::unique_ptr<std::byte, Free>;
  static Memory allocate(uint64_t bytes);

  uint32_t start_;
  bool attached_ = false;
  Memory workspace_, own_symmetric_, own_words_;
  uint64_t workspace_bytes_ = 0, symmetric_bytes_ = 0;
  std::byte* symmetric_ = nullptr;
  uint32_t* words_ = nullptr;
  std::vector<EventCell> cells_;
  std::vector<uint32_t> word_base_;
  int64_t pid_ = 0;
};

// One rank's part in a launch. tensors[i]: memory of tensor i; null where the workspace holds it.
struct RankLaunch {
  // A tensor that peers write and the caller wants: copied out when the launch has ended, before the next one begins.
  struct Copy {
    uint32_t tensor;
    void* target;
  };
  const PlanImage* image;
  Workspace* workspace;
  std::vector<void*> tensors;
  std::vector<Copy> outputs;
  TraceRecord* trace = nullptr;  // one a task, or null: no clock is read
};

// The other ranks of a launch, where each is a process of its own. Memory of rank p is at [p].
struct Peers {
  shmem::SymmetricHeap* heap = nullptr;
  std::vector<std::byte*> symmetric;
  std::vector<uint32_t*> words;
  uint64_t stride = 0;         // words that each rank has in each heap
  uint64_t epoch = 0;          // number of this launch in its workspace, from 1; equal on all ranks
  uint64_t tag = 0;            // of what is launched; must be equal on all ranks
  double entry_timeout_s = 0;  // how long a peer may take to enter the launch
};

struct LaunchOptions {
  uint32_t workers = 0;  // threads of each rank; 0: as many as the processors allow, and no more than queues
  double timeout_s = 0;  // 0: none
  void* context = nullptr;
  std::shared_ptr<void> keep;  // what plans, memory and context live in: held while any task body may still run
  Peers* peers = nullptr;      // null: all ranks are in this process
  bool (*interrupted)(void* context) = nullptr;  // polled by the launching thread about every 20 ms
  bool (*python_task)(void* context, uint32_t rank, uint32_t task) = nullptr;  // a Python kernel; false: it failed
};

enum class LaunchStatus : uint32_t {
  kDone,
  kTaskFailed,
  kTimedOut,
  kInterrupted,
  kNested,
  kClosed,
  kNoThreads,
  kGroupEnded,    // a peer ended the launch, or died: the heap knows
  kWrongProgram,  // `rank` has entered this launch with another tag
  kNotEntered,    // `rank` has not entered this launch in time
  kNoMemory,
  kHung  // refused: `task` of an earlier launch of `rank` is still inside its body
};

enum class CoreState : uint32_t {
  kDone,
  kWaiting,  // for `event`
  kRunning,  // inside `task`
  kReady     // `task` could start: its worker has not come to it
};

// Where one core stood when a launch passed its deadline: one cache line, of the same layout on every machine.
struct CoreRecord {
  uint32_t rank;
  uint32_t queue;  // kNone: the host, which waits for what peers put
  uint32_t kind;   // CoreKind, and number among the cores of that kind
  uint32_t core;
  uint32_t worker;  // the thread of that rank that walks the queue
  uint32_t state;   // CoreState
  uint32_t task;    // the one inside, or the next; kNone: none is left
  uint32_t event;   // the first that the task lacks; kNone: its launch, which the host has not dispatched
  uint32_t have;
  uint32_t need;
  uint32_t ended;      // tasks of the queue
  uint32_t tasks;      // of the queue
  uint64_t launch;     // epoch of the launch in its group; 0 where all ranks share a process
  int64_t elapsed_ns;  // since the launch began
};
static_assert(sizeof(CoreRecord) == 64);

struct LaunchOutcome {
  LaunchStatus status = LaunchStatus::kDone;
  uint32_t rank = 0, task = 0;  // of the task that failed, or does not end; the rank that the status speaks of
  std::string reason;
  std::vector<CoreRecord> cores;  // every one with tasks, if the deadline passed or the group ended the launch
  std::vector<CoreRecord> stuck;  // those inside a task body that did not end when the launch was ended
  std::shared_ptr<void> hung;     // kHung: what the launch that is in the way keeps
  double seconds = 0;
};

// How long a launch that has been ended waits for the task bodies that run, and the next one for those left behind.
inline constexpr double kGraceSeconds = 1.0;
inline constexpr double kPatienceSeconds = 5.0;

// What tests do to every launch of this process. Nothing that a proven plan computes may depend on the first two.
struct Adversity {
  uint64_t seed = 0;         // not 0: the threads are held up at random at every step
  bool incoherent = false;   // scalar words are cached by each worker; a stale read fails the launch
  bool poll_cached = false;  // a fault: counters are polled through that cache
  uint32_t drop_rank = kNone, drop_task = kNone, drop_signal = kNone;  // a fault: this signal is never sent
};
void set_adversity(const Adversity& adversity);

// Processors that this process may use, as the plan's default device counts them.
void set_processors(uint32_t count);

// Run the launches of all ranks together. Callers take turns; a call from inside a kernel is refused (kNested).
// A launch that is ended leaves task bodies that do not come to an end within the grace where they are. Until they do,
// every further launch is refused (kHung), once its patience is over.
LaunchOutcome launch(std::vector<RankLaunch> ranks, const LaunchOptions& options);

// End the running launch if there is one, join all workers; later launches are refused (kClosed). For process exit.
// Workers inside a task body that does not end are left to the end of the process: then false.
bool close_engine();

// Whether no task body of a launch that was ended is still running. What such a launch kept is given up once none is.
bool settled();

uint32_t worker_threads();  // alive now

}  // namespace hyper_mpmd
