#include "hyper_mpmd/engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include "hyper_mpmd/lent_gemm.h"
#include "run_kernel.h"

namespace hyper_mpmd {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPollEvery = std::chrono::milliseconds(20);

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

void cpu_relax() {
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
  uint32_t stop = 0;                   // a LaunchStatus; 0 while the launch goes on. Accessed atomically.
  std::vector<uint32_t> workers_left;  // [rank], workers that have not finished their queues. Accessed atomically.
  std::mutex mutex;                    // of the outcome
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
      : job_(job),
        launch_((*job.ranks)[rank]),
        rank_(rank),
        worker_(worker),
        scratch_(scratch),
        backoff_(job.may_spin) {}

  static uint32_t load_acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static void add_release(uint32_t* word) { __atomic_fetch_add(word, 1, __ATOMIC_RELEASE); }
  bool stopped() const { return job_.stopped(); }
  void pause() { backoff_.wait(); }
  void progress() { backoff_.reset(); }

  bool run(const TaskRecord& task, uint32_t number) {
    const PlanImage& image = *launch_.image;
    const auto kernel = static_cast<Kernel>(image.ops[task.op].kernel);
    if (kernel == Kernel::kNop) return true;
    if (kernel == Kernel::kPython) {
      if (job_.options->python_task(job_.options->context, rank_, number)) return true;
      job_.end(LaunchStatus::kTaskFailed, rank_, number);
      return false;
    }
    std::string fault;
    try {
      fault = run_kernel(image, job_.tensors, task, scratch_);
    } catch (const std::exception& error) {
      fault = error.what();
    }
    if (fault.empty()) return true;
    job_.end(LaunchStatus::kTaskFailed, rank_, number, std::move(fault));
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
  uint32_t rank_, worker_;
  kernels::Scratch& scratch_;
  Backoff backoff_;
};

// The queues of one worker: each kind's queues with tasks are dealt out in turn.
std::vector<uint32_t> queues_of(const PlanImage& image, uint32_t worker, uint32_t workers) {
  std::vector<uint32_t> mine;
  uint32_t turn = 0;
  for (uint32_t q = 0; q < image.queues.size(); ++q) {
    if (image.queues[q].count == 0) continue;
    if (turn++ % workers == worker) mine.push_back(q);
  }
  return mine;
}

void note_blocked(Job& job, uint32_t rank, const std::vector<uint32_t>& queues, const std::vector<Cursor>& cursors) {
  const RankView& view = job.views[rank];
  const PlanImage& image = *(*job.ranks)[rank].image;
  std::vector<BlockedCore> found;
  for (size_t i = 0; i < cursors.size(); ++i) {
    const Cursor& cursor = cursors[i];
    if (cursor.next == cursor.end) continue;
    const TaskRecord& task = image.tasks[cursor.next];
    BlockedCore core{rank, queues[i], cursor.next, kNone, 0, 0};
    if (cursor.wait < task.wait_count) {
      const WaitRecord& wait = image.waits[task.wait_begin + cursor.wait];
      const uint32_t* word =
          wait.event < view.local_events ? &view.cells[wait.event].count : &view.heap[image.events[wait.event].slot];
      core.event = wait.event;
      core.have = __atomic_load_n(word, __ATOMIC_ACQUIRE) - event_base(view, wait.event);
      core.need = wait.threshold;
    }
    found.push_back(core);
  }
  const std::lock_guard lock(job.mutex);
  job.outcome.blocked.insert(job.outcome.blocked.end(), found.begin(), found.end());
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
  if (!walk(platform, job.views[rank], cursors.data(), static_cast<uint32_t>(cursors.size()))) {
    note_blocked(job, rank, queues, cursors);
    return;
  }
  // The last worker of the rank tells the peers that they may write its buffers for the next launch.
  if (__atomic_sub_fetch(&job.workers_left[rank], 1, __ATOMIC_ACQ_REL) != 0 || image.heap_words() == 0) return;
  for (uint32_t peer = 0; peer < image.ranks; ++peer) {
    if (peer != rank) platform.add_release(&job.views[rank].peer_heaps[peer][image.peers[peer].credit_slot]);
  }
}

void work(Job& job, uint32_t thread, kernels::Scratch& scratch) {
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

thread_local bool in_worker = false;

// Worker threads of this process. They park between launches.
class Pool {
 public:
  ~Pool() { join(); }

  // Have `threads` workers alive, or as many as could be started: then false.
  bool grow(uint32_t threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals go to the threads that Python knows
    bool good = true;
    try {
      while (threads_.size() < threads) {
        threads_.emplace_back(
            [this, index = static_cast<uint32_t>(threads_.size()), seen = generation_] { loop(index, seen); });
      }
    } catch (const std::system_error&) {
      good = false;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return good;
  }

  void start(Job& job) {
    const std::lock_guard lock(mutex_);
    job_ = &job;
    running_ = job.threads;
    ++generation_;
    wake_.notify_all();
  }

  // Whether all workers have left the job, waiting for it at most `wait`.
  bool finished(Clock::duration wait) {
    std::unique_lock lock(mutex_);
    // The system clock, as in Turn.
    return idle_.wait_until(lock, std::chrono::system_clock::now() + wait, [this] { return running_ == 0; });
  }

  void join() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
      wake_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  uint32_t size() const { return static_cast<uint32_t>(threads_.size()); }

 private:
  void loop(uint32_t index, uint64_t seen) {
    in_worker = true;
    pthread_setname_np(pthread_self(), ("mpmd-" + std::to_string(index)).c_str());
    kernels::Scratch scratch;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return closing_ || generation_ != seen; });
      if (closing_) return;
      seen = generation_;
      Job* job = job_;
      if (job == nullptr || index >= job->threads) continue;
      lock.unlock();
      work(*job, index, scratch);
      lock.lock();
      if (--running_ == 0) {
        job_ = nullptr;
        idle_.notify_all();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::vector<std::thread> threads_;
  Job* job_ = nullptr;
  uint64_t generation_ = 0;
  uint32_t running_ = 0;
  bool closing_ = false;
};

// One launch at a time; callers wait for theirs, looking up now and then.
class Turn {
 public:
  bool take(Clock::duration wait) {
    std::unique_lock lock(mutex_);
    // The system clock: ThreadSanitizer does not know the calls that wait on the steady one.
    if (!free_.wait_until(lock, std::chrono::system_clock::now() + wait, [this] { return !taken_; })) return false;
    taken_ = true;
    return true;
  }
  void give_back() {
    const std::lock_guard lock(mutex_);
    taken_ = false;
    free_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable free_;
  bool taken_ = false;
};

struct TurnGuard {
  Turn& turn;
  ~TurnGuard() { turn.give_back(); }
};

struct Engine {
  Turn turn;
  Pool pool;
  std::atomic<bool> closed{false};
  std::mutex job_mutex;
  Job* job = nullptr;  // the running one

  void run(Job* next) {
    const std::lock_guard lock(job_mutex);
    job = next;
  }
};

std::atomic<Engine*> the_engine{nullptr};
std::atomic<uint32_t> processors{0};

// A forked child has none of the parent's threads, and its locks may be held by threads that are gone. It leaves the
// parent's engine where it lies and makes its own.
void forget_engine() { the_engine.store(nullptr, std::memory_order_relaxed); }

Engine& engine() {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_engine);
  (void)registered;
  Engine* current = the_engine.load(std::memory_order_acquire);
  if (current == nullptr) {
    auto* fresh = new Engine;
    if (the_engine.compare_exchange_strong(current, fresh)) return *fresh;
    delete fresh;
  }
  return *current;
}

uint32_t processor_count() {
  const uint32_t set = processors.load(std::memory_order_relaxed);
  return set != 0 ? set : std::max(1u, std::thread::hardware_concurrency());
}

uint32_t busy_queues(const PlanImage& image) {
  return static_cast<uint32_t>(
      std::count_if(image.queues.begin(), image.queues.end(), [](const QueueRecord& q) { return q.count != 0; }));
}

uint32_t workers_for(const std::vector<RankLaunch>& ranks, const LaunchOptions& options) {
  uint32_t queues = 1;
  for (const RankLaunch& rank : ranks) queues = std::max(queues, busy_queues(*rank.image));
  const uint32_t share = std::max<uint32_t>(1, processor_count() / static_cast<uint32_t>(ranks.size()));
  return std::min(queues, options.workers != 0 ? options.workers : share);
}

// Under O0 the launching thread is the host: it dispatches a launch once those it waits for have ended.
class Dispatcher {
 public:
  explicit Dispatcher(Job& job) : job_(job), ranks_(job.ranks->size()) {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const PlanImage& image = *(*job.ranks)[r].image;
      if (!image.dispatched()) continue;
      ranks_[r].gates.assign(image.launches.size(), 0);
      ranks_[r].done.assign(image.launches.size(), 0);
      ranks_[r].left = image.launches.size();
      job.views[r].gates = ranks_[r].gates.data();
      job.views[r].launch_done = ranks_[r].done.data();
      left_ += ranks_[r].left;
    }
  }

  bool all_dispatched() const { return left_ == 0; }

  // Dispatch what can be; true if anything was.
  bool step() {
    bool any = false;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      Rank& rank = ranks_[r];
      const PlanImage& image = *(*job_.ranks)[r].image;
      for (uint32_t l = 0; rank.left != 0 && l < image.launches.size(); ++l) {
        if (rank.gates[l] || !ended(image, rank, image.launches[l])) continue;
        __atomic_store_n(&rank.gates[l], 1, __ATOMIC_RELEASE);
        --rank.left;
        --left_;
        any = true;
      }
    }
    return any;
  }

 private:
  struct Rank {
    std::vector<uint32_t> gates, done;
    size_t left = 0;
  };

  static bool ended(const PlanImage& image, const Rank& rank, const LaunchRecord& launch) {
    for (uint32_t d = 0; d < launch.dependency_count; ++d) {
      const uint32_t before = image.dependencies[launch.dependency_begin + d];
      // Acquire: what the tasks of the ended launch wrote is handed on through the gate.
      if (__atomic_load_n(&rank.done[before], __ATOMIC_ACQUIRE) != image.launches[before].task_count) return false;
    }
    return true;
  }

  Job& job_;
  std::vector<Rank> ranks_;
  size_t left_ = 0;
};

void bind(Job& job) {
  std::vector<RankLaunch>& ranks = *job.ranks;
  job.tensors.resize(ranks.size());
  for (size_t r = 0; r < ranks.size(); ++r) {
    const PlanImage& image = *ranks[r].image;
    Workspace& workspace = *ranks[r].workspace;
    if (!workspace.of_this_process()) workspace.reset(0);
    job.scratch = std::max(job.scratch, scratch_bytes(image));
    job.tensors[r] = ranks[r].tensors;
    job.tensors[r].resize(image.tensors.size(), nullptr);
    for (size_t t = 0; t < image.tensors.size(); ++t) {
      const TensorRecord& tensor = image.tensors[t];
      if (tensor.role == static_cast<uint32_t>(Role::kWorkspace)) {
        job.tensors[r][t] = workspace.workspace() + tensor.offset;
      } else if (tensor.role == static_cast<uint32_t>(Role::kSymmetric)) {
        job.tensors[r][t] = workspace.symmetric() + tensor.offset;
      } else if (tensor.storage != t) {
        job.tensors[r][t] = job.tensors[r][tensor.storage];
      }
    }
  }
}

}  // namespace

void set_processors(uint32_t count) { processors.store(count, std::memory_order_relaxed); }

LaunchOutcome launch(std::vector<RankLaunch>& ranks, const LaunchOptions& options) {
  LaunchOutcome refused;
  const auto refuse = [&](LaunchStatus status) {
    refused.status = status;
    return refused;
  };
  if (in_worker) return refuse(LaunchStatus::kNested);
  Engine& self = engine();
  while (!self.turn.take(kPollEvery)) {
    if (self.closed) return refuse(LaunchStatus::kClosed);
    if (options.interrupted != nullptr && options.interrupted(options.context)) {
      return refuse(LaunchStatus::kInterrupted);
    }
  }
  const TurnGuard turn{self.turn};
  if (self.closed) return refuse(LaunchStatus::kClosed);

  Job job;
  job.ranks = &ranks;
  job.options = &options;
  job.workers = workers_for(ranks, options);
  job.threads = job.workers * static_cast<uint32_t>(ranks.size());
  job.workers_left.assign(ranks.size(), job.workers);
  job.may_spin = job.threads <= processor_count();
  bind(job);
  std::vector<uint32_t*> heaps;
  for (RankLaunch& rank : ranks) heaps.push_back(rank.workspace->heap());
  for (size_t r = 0; r < ranks.size(); ++r) {
    const PlanImage& image = *ranks[r].image;
    Workspace& workspace = *ranks[r].workspace;
    job.views.push_back({image.tasks.data(), image.waits.data(), image.signals.data(), image.events.data(),
                         static_cast<uint32_t>(r), image.local_events(), workspace.cells(), workspace.heap(),
                         workspace.heap_base(), heaps.data(), nullptr, nullptr});
  }
  Dispatcher dispatcher(job);
  if (!self.pool.grow(job.threads)) return refuse(LaunchStatus::kNoThreads);

  const auto begin = Clock::now();
  auto next_poll = begin + kPollEvery;
  self.run(&job);
  self.pool.start(job);
  Backoff backoff(false);
  for (;;) {
    const bool host_is_idle = dispatcher.all_dispatched() || job.stopped();
    if (self.pool.finished(host_is_idle ? Clock::duration(kPollEvery) : Clock::duration::zero())) break;
    if (!host_is_idle) {
      if (dispatcher.step()) {
        backoff.reset();
      } else {
        backoff.wait();
      }
    }
    const auto now = Clock::now();
    if (now < next_poll) continue;
    next_poll = now + kPollEvery;
    if (options.timeout_s > 0 && std::chrono::duration<double>(now - begin).count() > options.timeout_s) {
      job.end(LaunchStatus::kTimedOut);
    }
    if (options.interrupted != nullptr && !job.stopped() && options.interrupted(options.context)) {
      job.end(LaunchStatus::kInterrupted);
    }
  }
  self.run(nullptr);
  job.outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();

  for (RankLaunch& rank : ranks) {
    if (job.stopped()) {
      rank.workspace->reset(0);
      continue;
    }
    rank.workspace->launched(*rank.image);
    for (const RankLaunch::Copy& copy : rank.outputs) {
      const std::byte* source = rank.workspace->symmetric() + rank.image->tensors[copy.tensor].offset;
      if (const uint64_t bytes = rank.image->bytes_of(copy.tensor); bytes != 0) std::memcpy(copy.target, source, bytes);
    }
  }
  return std::move(job.outcome);
}

void close_engine() {
  Engine& self = engine();
  self.closed = true;
  {
    const std::lock_guard lock(self.job_mutex);
    if (self.job != nullptr) self.job->end(LaunchStatus::kClosed);
  }
  while (!self.turn.take(kPollEvery)) {
  }
  const TurnGuard turn{self.turn};
  self.pool.join();
}

uint32_t worker_threads() { return engine().pool.size(); }

}  // namespace hyper_mpmd
