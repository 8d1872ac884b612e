#include "hyper_mpmd/engine.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "engine_host.h"
#include "engine_pool.h"

namespace hyper_mpmd {

namespace {

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
  // The ranks of this host share its processors, whether they are threads of this process or processes.
  const uint32_t share = std::max(1u, processor_count() / ranks[0].image->ranks);
  return std::min(queues, options.workers != 0 ? options.workers : share);
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
  job.may_spin = uint64_t{job.workers} * ranks[0].image->ranks <= processor_count();
  std::vector<uint32_t*> words;
  try {
    for (RankLaunch& rank : ranks) rank.workspace->fit(*rank.image);
  } catch (const std::exception& error) {
    refused.reason = error.what();
    return refuse(LaunchStatus::kNoMemory);
  }
  bind(job, words);
  for (RankLaunch& rank : ranks) {
    const PlanImage& image = *rank.image;
    Workspace& workspace = *rank.workspace;
    job.views.push_back({image.tasks.data(), image.waits.data(), image.signals.data(), image.events.data(), image.rank,
                         image.local_events(), workspace.cells(), workspace.words(), workspace.word_base(),
                         words.data(), nullptr, nullptr});
  }
  Dispatcher dispatcher(job);
  if (!self.pool.grow(job.threads)) return refuse(LaunchStatus::kNoThreads);

  const auto begin = Clock::now();
  auto next_poll = begin + kPollEvery;
  Watch watch(job, begin);
  const auto look = [&](Clock::time_point now) {
    watch.look(now, options.timeout_s);
    if (options.interrupted != nullptr && !job.stopped() && options.interrupted(options.context)) {
      job.end(LaunchStatus::kInterrupted);
    }
  };
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
    look(now);
  }
  if (options.peers != nullptr && !job.stopped()) {
    Arrivals arrivals(job.views[0], *ranks[0].image);
    Backoff patience(job.may_spin);
    while (arrivals.missing() != kNone && !job.stopped()) {
      patience.wait();
      const auto now = Clock::now();
      if (now < next_poll) continue;
      next_poll = now + kPollEvery;
      look(now);
      if (job.stopped()) job.outcome.blocked.push_back(arrivals.blocked());
    }
    watch.last_look();
  }
  self.run(nullptr);
  job.outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();

  for (RankLaunch& rank : ranks) {
    if (job.stopped()) {
      rank.workspace->reset(0);
    } else {
      finish(rank, words);
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
