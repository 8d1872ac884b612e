// One launch as its threads see it: what they share, how a worker waits, runs a task and tells where it stood.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "engine_adverse.h"
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

// What one worker walks: its queues, and where it stands in each.
struct Walk {
  std::vector<uint32_t> queues;
  std::vector<Cursor> cursors;
};

// What all threads of one launch share. It lives until the last of them has left, which may be after the launch.
struct Job {
  std::vector<RankLaunch> ranks;
  LaunchOptions options;
  Adversity adversity;
  std::vector<RankView> views;
  std::vector<Walk> walks;  // [thread]
  TensorTable tensors;
  uint32_t workers = 0;  // of each rank
  uint32_t threads = 0;  // of all ranks
  bool may_spin = false;
  size_t scratch = 0;
  uint64_t number = 0;  // of the launches of this process
  uint32_t stop = 0;    // a LaunchStatus; 0 while the launch goes on. Accessed atomically.
  std::mutex mutex;     // of the outcome
  LaunchOutcome outcome;
  LineWriters line_writers;

  bool ended_as(LaunchStatus status) const {
    return __atomic_load_n(&stop, __ATOMIC_RELAXED) == static_cast<uint32_t>(status);
  }
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

template <bool kTraced, bool kAdverse>
class CpuPlatform {
 public:
  CpuPlatform(Job& job, uint32_t thread, kernels::Scratch& scratch)
      : job_(job),
        launch_(job.ranks[thread / job.workers]),
        thread_(thread),
        scratch_(scratch),
        backoff_(job.may_spin),
        adverse_(job, thread) {}

  uint32_t load_acquire(const uint32_t* word) {
    if constexpr (kAdverse) {
      adverse_.delays.step();
      if (job_.adversity.poll_cached) return adverse_.cache.read(word);
    }
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
  }
  uint32_t load_cached(const uint32_t* word) {
    if constexpr (kAdverse) {
      if (job_.adversity.incoherent) return adverse_.cache.read(word);
    }
    return *word;
  }
  void add_release(uint32_t* word) {
    if constexpr (kAdverse) adverse_.delays.step();
    __atomic_fetch_add(word, 1, __ATOMIC_RELEASE);
  }
  void publish(uint32_t* word, uint32_t value) {
    if constexpr (kAdverse) {
      adverse_.delays.step();
      if (job_.adversity.incoherent && adverse_.fault.empty()) adverse_.fault = job_.line_writers.store(word, thread_);
    }
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
  }
  bool stopped() const { return job_.stopped(); }
  bool sends(uint32_t task, uint32_t signal) const {
    if constexpr (kAdverse) {
      const Adversity& faults = job_.adversity;
      return faults.drop_rank != launch_.image->rank || faults.drop_task != task || faults.drop_signal != signal;
    }
    return true;
  }
  void pause() {
    if constexpr (kAdverse) check_lines(0);
    backoff_.wait();
  }
  void progress() { backoff_.reset(); }

  bool run(const TaskRecord& task, uint32_t number) {
    if constexpr (kAdverse) {
      if (!check_lines(number)) return false;
    }
    const PlanImage& image = *launch_.image;
    const auto kernel = static_cast<Kernel>(image.ops[task.op].kernel);
    if (kernel == Kernel::kNop) return true;
    if (kernel == Kernel::kPython) {
      if (job_.options.python_task(job_.options.context, image.rank, number)) return true;
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
      record.worker = thread_ % job_.workers;
    }
  }
  void finished(uint32_t task) {
    if constexpr (kTraced) launch_.trace[task].end_ns = now_ns();
  }

 private:
  struct Nothing {
    Nothing(const Job&, uint32_t) {}
  };
  struct Adverse {
    Adverse(const Job& job, uint32_t thread) : delays(job.adversity.seed, job.number * 1024 + thread) {}
    Delays delays;
    ShadowCache cache;
    std::string fault;
  };

  bool check_lines(uint32_t task) {
    const std::string& fault = adverse_.fault.empty() ? adverse_.cache.fault() : adverse_.fault;
    if (fault.empty()) return true;
    job_.end(LaunchStatus::kTaskFailed, launch_.image->rank, task, fault);
    return false;
  }

  Job& job_;
  RankLaunch& launch_;
  uint32_t thread_;
  kernels::Scratch& scratch_;
  Backoff backoff_;
  [[no_unique_address]] std::conditional_t<kAdverse, Adverse, Nothing> adverse_;
};

// The queues of one worker: each kind's queues with tasks are dealt out in turn.
inline Walk walk_of(const PlanImage& image, uint32_t worker, uint32_t workers) {
  Walk mine;
  uint32_t turn = 0;
  for (uint32_t q = 0; q < image.queues.size(); ++q) {
    const QueueRecord& queue = image.queues[q];
    if (queue.count == 0) continue;
    if (turn++ % workers != worker) continue;
    mine.queues.push_back(q);
    mine.cursors.push_back({queue.begin, queue.begin + queue.count, 0});
  }
  return mine;
}

template <bool kTraced, bool kAdverse>
void work_as(Job& job, uint32_t thread, kernels::Scratch& scratch) {
  CpuPlatform<kTraced, kAdverse> platform(job, thread, scratch);
  std::vector<Cursor>& cursors = job.walks[thread].cursors;
  walk(platform, job.views[thread / job.workers], cursors.data(), static_cast<uint32_t>(cursors.size()));
}

inline bool adverse(const Adversity& adversity) {
  return adversity.seed != 0 || adversity.incoherent || adversity.poll_cached || adversity.drop_task != kNone;
}

inline void work(Job& job, uint32_t thread, kernels::Scratch& scratch) {
  try {
    kernels::lent_gemm_thread_init();
    scratch.reserve(job.scratch);
    const bool traced = job.ranks[thread / job.workers].trace != nullptr;
    if (adverse(job.adversity)) {
      traced ? work_as<true, true>(job, thread, scratch) : work_as<false, true>(job, thread, scratch);
    } else {
      traced ? work_as<true, false>(job, thread, scratch) : work_as<false, false>(job, thread, scratch);
    }
  } catch (const std::exception& error) {
    job.end(LaunchStatus::kNoThreads, thread / job.workers, 0, error.what());
  }
}

}  // namespace hyper_mpmd
