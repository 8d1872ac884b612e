// One launch as its threads see it: what they share, how a worker waits, runs a task and tells where it stood.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "hyper_mpmd/engine.h"
#include "hyper_mpmd/lent_gemm.h"
#include "run_kernel.h"

namespace hyper_mpmd {

using Clock = std::chrono::steady_clock;
inline constexpr auto kPollEvery = std::chrono::milliseconds(20);

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A waiter spins for a while if every thread has a processor, then yields, then sleeps ever longer. Signals cost
// nothing extra: nobody has to be woken.
class Backoff {
 public:
  explicit Backoff(bool may_spin) : may_spin_(may_spin) {}
  void reset() { step_ = 0; }
  void wait() {
    const uint32_t step = step_ < kLast ? step_++ : step_;
    if (step < kSpins) {
      if (may_spin_) {
        cpu_relax();
        return;
      }
      step_ = kSpins;
    }
    if (step < kYields) {
      sched_yield();
      return;
    }
    const uint32_t doubling = std::min((step - kYields) / 4, 3u);
    const timespec nap{0, 20'000L << doubling};  // 20 to 160 us
    nanosleep(&nap, nullptr);
  }

 private:
  static constexpr uint32_t kSpins = 2000, kYields = 2040, kLast = 3000;
  bool may_spin_;
  uint32_t step_ = 0;
};

// What all threads of one launch share.
struct Job {
  std::vector<RankLaunch>* ranks = nullptr;
  const LaunchOptions* options = nullptr;
  std::vector<RankView> views;
  TensorTable tensors;
  uint32_t workers = 0;  // of each rank
  uint32_t threads = 0;  // of all ranks
  bool may_spin = false;
  size_t scratch = 0;
  uint32_t stop = 0;  // a LaunchStatus; 0 while the launch goes on. Accessed atomically.
  std::mutex mutex;   // of the outcome
  LaunchOutcome outcome;

  bool stopped() const { return __atomic_load_n(&stop, __ATOMIC_RELAXED) != 0; }

  // End the launch on all ranks. The first reason is the one that is told.
  void end(LaunchStatus status, uint32_t rank = 0, uint32_t task = 0, std::string reason = {}) {
    const std::lock_guard lock(mutex);
    if (stop != 0) return;
    outcome.status = status;
    outcome.rank = rank;
    outcome.task = task;
    outcome.reason = std::move(reason);
    __atomic_store_n(&stop, static_cast<uint32_t>(status), __ATOMIC_RELAXED);
  }
};

template <bool kTraced>
class CpuPlatform {
 public:
  CpuPlatform(Job& job, uint32_t rank, uint32_t worker, kernels::Scratch& scratch)
      : job_(job), launch_((*job.ranks)[rank]), worker_(worker), scratch_(scratch), backoff_(job.may_spin) {}

  static uint32_t load_acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static void add_release(uint32_t* word) { __atomic_fetch_add(word, 1, __ATOMIC_RELEASE); }
  bool stopped() const { return job_.stopped(); }
  void pause() {
    last_ = kNone;
    backoff_.wait();
  }
  void progress() {
    last_ = kNone;
    backoff_.reset();
  }
  // The task that the worker has been in since it last looked round; kNone if it found nothing to run since.
  uint32_t last() const { return last_; }

  bool run(const TaskRecord& task, uint32_t number) {
    last_ = number;
    const PlanImage& image = *launch_.image;
    const auto kernel = static_cast<Kernel>(image.ops[task.op].kernel);
    if (kernel == Kernel::kNop) return true;
    if (kernel == Kernel::kPython) {
      if (job_.options->python_task(job_.options->context, image.rank, number)) return true;
      job_.end(LaunchStatus::kTaskFailed, image.rank, number);
      return false;
    }
    std::string fault;
    try {
      fault = run_kernel(image, job_.tensors, task, scratch_);
    } catch (const std::exception& error) {
      fault = error.what();
    }
    if (fault.empty()) return true;
    job_.end(LaunchStatus::kTaskFailed, image.rank, number, std::move(fault));
    return false;
  }

  void blocked(uint32_t task) {
    if constexpr (kTraced) {
      TraceRecord& record = launch_.trace[task];
      if (record.blocked_ns == 0) record.blocked_ns = now_ns();
    }
  }
  void started(uint32_t task) {
    if constexpr (kTraced) {
      TraceRecord& record = launch_.trace[task];
      record.start_ns = now_ns();
      if (record.blocked_ns == 0) record.blocked_ns = record.start_ns;
      record.worker = worker_;
    }
  }
  void finished(uint32_t task) {
    if constexpr (kTraced) launch_.trace[task].end_ns = now_ns();
  }

 private:
  Job& job_;
  RankLaunch& launch_;
  uint32_t worker_;
  kernels::Scratch& scratch_;
  Backoff backoff_;
  uint32_t last_ = kNone;
};

// The queues of one worker: each kind's queues with tasks are dealt out in turn.
inline std::vector<uint32_t> queues_of(const PlanImage& image, uint32_t worker, uint32_t workers) {
  std::vector<uint32_t> mine;
  uint32_t turn = 0;
  for (uint32_t q = 0; q < image.queues.size(); ++q) {
    if (image.queues[q].count == 0) continue;
    if (turn++ % workers == worker) mine.push_back(q);
  }
  return mine;
}

// Where the cores of a worker stood when the launch was ended. One whose next task could have run was not blocked: it
// was inside the task before.
template <class Platform>
void note_blocked(Platform& platform, Job& job, uint32_t rank, const std::vector<uint32_t>& queues,
                  const std::vector<Cursor>& cursors) {
  const RankView& view = job.views[rank];
  const PlanImage& image = *(*job.ranks)[rank].image;
  std::vector<BlockedCore> found, running;
  for (size_t i = 0; i < cursors.size(); ++i) {
    Cursor cursor = cursors[i];
    const QueueRecord& queue = image.queues[queues[i]];
    if (platform.last() != kNone && platform.last() - queue.begin < queue.count) {
      running.push_back({image.rank, queues[i], platform.last(), kNone, 0, 0});
      continue;
    }
    if (cursor.next == cursor.end || ready(platform, view, cursor)) continue;
    const TaskRecord& task = image.tasks[cursor.next];
    BlockedCore core{image.rank, queues[i], cursor.next, kNone, 0, 0};
    if (view.gates == nullptr || platform.load_acquire(&view.gates[task.launch]) != 0) {
      const WaitRecord& wait = image.waits[task.wait_begin + cursor.wait];
      core.event = wait.event;
      core.have = event_count(platform, view, wait.event) - event_base(view, wait.event);
      core.need = wait.threshold;
    }
    found.push_back(core);
  }
  const std::lock_guard lock(job.mutex);
  job.outcome.blocked.insert(job.outcome.blocked.end(), found.begin(), found.end());
  job.outcome.running.insert(job.outcome.running.end(), running.begin(), running.end());
}

template <bool kTraced>
void work_as(Job& job, uint32_t thread, kernels::Scratch& scratch) {
  const uint32_t rank = thread / job.workers;
  const PlanImage& image = *(*job.ranks)[rank].image;
  const std::vector<uint32_t> queues = queues_of(image, thread % job.workers, job.workers);
  std::vector<Cursor> cursors;
  for (const uint32_t q : queues) {
    cursors.push_back({image.queues[q].begin, image.queues[q].begin + image.queues[q].count, 0});
  }
  CpuPlatform<kTraced> platform(job, rank, thread % job.workers, scratch);
  const bool done = walk(platform, job.views[rank], cursors.data(), static_cast<uint32_t>(cursors.size()));
  // A worker that came to its end after the launch was ended was inside its last task then.
  if (!done || job.stopped()) note_blocked(platform, job, rank, queues, cursors);
}

inline void work(Job& job, uint32_t thread, kernels::Scratch& scratch) {
  try {
    kernels::lent_gemm_thread_init();
    scratch.reserve(job.scratch);
    if ((*job.ranks)[thread / job.workers].trace != nullptr) {
      work_as<true>(job, thread, scratch);
    } else {
      work_as<false>(job, thread, scratch);
    }
  } catch (const std::exception& error) {
    job.end(LaunchStatus::kNoThreads, thread / job.workers, 0, error.what());
  }
}

}  // namespace hyper_mpmd
