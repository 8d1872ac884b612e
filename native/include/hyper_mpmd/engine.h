// The CPU engine: persistent worker threads that run any plan, or the plans of a world, on any number of workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hyper_mpmd/plan_image.h"
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

// What one rank's plan keeps between launches: its buffers, and counters that only grow.
class Workspace {
 public:
  // counters start at `start`: a test begins near the wrap-around. Throws std::bad_alloc.
  explicit Workspace(const PlanImage& image, uint32_t start = 0);

  std::byte* workspace() { return workspace_.get(); }
  std::byte* symmetric() { return symmetric_.get(); }
  uint32_t* heap() { return heap_; }
  EventCell* cells() { return cells_.data(); }
  const uint32_t* heap_base() const { return heap_base_.data(); }

  void launched(const PlanImage& image);  // a launch went well: the thresholds are added to the bases
  void reset(uint32_t start);             // after a failed launch: counters and bases agree again
  bool of_this_process() const;           // false in a forked child, which must reset before its first launch

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  using Memory = std::unique_ptr<std::byte, Free>;
  static Memory allocate(uint64_t bytes);

  Memory workspace_, symmetric_, heap_memory_;
  uint32_t* heap_ = nullptr;
  uint64_t heap_words_ = 0;
  std::vector<EventCell> cells_;
  std::vector<uint32_t> heap_base_;
  int64_t pid_;
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

struct LaunchOptions {
  uint32_t workers = 0;  // threads of each rank; 0: as many as the processors allow, and no more than queues
  double timeout_s = 0;  // 0: none
  void* context = nullptr;
  bool (*interrupted)(void* context) = nullptr;  // polled by the launching thread about every 20 ms
  bool (*python_task)(void* context, uint32_t rank, uint32_t task) = nullptr;  // a Python kernel; false: it failed
};

enum class LaunchStatus : uint32_t { kDone, kTaskFailed, kTimedOut, kInterrupted, kNested, kClosed, kNoThreads };

// Where a core stood when a launch was ended early: the task at the head of its queue and the first event it lacked.
struct BlockedCore {
  uint32_t rank, queue, task, event, have, need;
};

struct LaunchOutcome {
  LaunchStatus status = LaunchStatus::kDone;
  uint32_t rank = 0, task = 0;  // of the task that failed
  std::string reason;
  std::vector<BlockedCore> blocked;  // event kNone: blocked by a launch that the host had not dispatched
  double seconds = 0;
};

// Processors that this process may use, as the plan's default device counts them.
void set_processors(uint32_t count);

// Run the launches of all ranks together. Callers take turns; a call from inside a kernel is refused (kNested).
LaunchOutcome launch(std::vector<RankLaunch>& ranks, const LaunchOptions& options);

// End the running launch if there is one, join all workers; later launches are refused (kClosed). For process exit.
void close_engine();

uint32_t worker_threads();  // alive now

}  // namespace hyper_mpmd
