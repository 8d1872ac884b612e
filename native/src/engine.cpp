#include "hyper_mpmd/engine.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "engine_host.h"
#include "engine_pool.h"

namespace hyper_mpmd {

namespace {

// All that threads of a launch may touch.
struct Running {
  Job job;
  std::vector<uint32_t*> words;
  std::optional<Dispatcher> dispatcher;
};

struct Engine {
  Turn turn;
  Pool pool;
  std::atomic<bool> closed{false};
  std::mutex job_mutex;
  Job* job = nullptr;             // the running one
  std::unique_ptr<Running> hung;  // one that was ended while a task body went on; of who has the turn
  uint64_t launches = 0;

  void run(Job* next) {
    const std::lock_guard lock(job_mutex);
    job = next;
  }

  // Whether no task body of an earlier launch is still running, after waiting for it at most `wait`.
  bool free(Clock::duration wait = Clock::duration::zero()) {
    if (hung == nullptr) return true;
    if (!pool.finished(wait)) return false;
    for (RankLaunch& rank : hung->job.ranks) rank.workspace->reset(0);
    hung.reset();
    return true;
  }
};

std::atomic<Engine*> the_engine{nullptr};
std::atomic<uint32_t> processors{0};
std::mutex adversity_mutex;
Adversity the_adversity;

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

// Wait until all workers have left the launch, dispatching and looking on; false: some are stuck in a task body.
bool attend(Pool& pool, Running& running, const std::function<void(Clock::time_point)>& look,
            Clock::time_point& next_poll) {
  Job& job = running.job;
  std::optional<Clock::time_point> ended;
  Backoff backoff(false);
  Delays delays(job.adversity.seed, ~job.number);
  for (;;) {
    const bool host_is_idle = running.dispatcher->all_dispatched() || job.stopped();
    if (pool.finished(host_is_idle ? Clock::duration(kPollEvery) : Clock::duration::zero())) return true;
    if (!host_is_idle) {
      delays.step();
      if (running.dispatcher->step()) {
        backoff.reset();
      } else {
        backoff.wait();
      }
    }
    const auto now = Clock::now();
    if (now < next_poll) continue;
    next_poll = now + kPollEvery;
    look(now);
    if (!job.stopped()) continue;
    if (!ended) ended = now;
    // Workers that wait leave at once. One that is late for want of a processor is inside no task.
    if (std::chrono::duration<double>(now - *ended).count() <= kGraceSeconds) continue;
    job.outcome.stuck = cores_inside(job);
    if (!job.outcome.stuck.empty()) return false;
  }
}

}  // namespace

void set_processors(uint32_t count) { processors.store(count, std::memory_order_relaxed); }

void set_adversity(const Adversity& adversity) {
  const std::lock_guard lock(adversity_mutex);
  the_adversity = adversity;
}

LaunchOutcome launch(std::vector<RankLaunch> ranks, const LaunchOptions& options) {
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
  const auto patience =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(kPatienceSeconds));
  while (!self.free(kPollEvery) && Clock::now() < patience) {
    if (self.closed) return refuse(LaunchStatus::kClosed);
    if (options.interrupted != nullptr && options.interrupted(options.context)) {
      return refuse(LaunchStatus::kInterrupted);
    }
  }
  if (self.hung != nullptr) {
    const CoreRecord& core = self.hung->job.outcome.stuck[0];
    refused.rank = core.rank;
    refused.task = core.task;
    refused.hung = self.hung->job.options.keep;
    return refuse(LaunchStatus::kHung);
  }

  auto running = std::make_unique<Running>();
  Job& job = running->job;
  job.ranks = std::move(ranks);
  job.options = options;
  job.number = ++self.launches;
  {
    const std::lock_guard lock(adversity_mutex);
    job.adversity = the_adversity;
  }
  const uint32_t world = job.ranks[0].image->ranks;
  job.workers = workers_for(job.ranks, options);
  job.threads = job.workers * static_cast<uint32_t>(job.ranks.size());
  job.may_spin = uint64_t{job.workers} * world <= processor_count();
  try {
    for (RankLaunch& rank : job.ranks) rank.workspace->fit(*rank.image);
  } catch (const std::exception& error) {
    refused.reason = error.what();
    return refuse(LaunchStatus::kNoMemory);
  }
  bind(job, running->words);
  for (RankLaunch& rank : job.ranks) {
    const PlanImage& image = *rank.image;
    Workspace& workspace = *rank.workspace;
    job.views.push_back({image.tasks.data(), image.waits.data(), image.signals.data(), image.events.data(), image.rank,
                         image.local_events(), workspace.cells(), workspace.words(), workspace.word_base(),
                         running->words.data(), nullptr, nullptr});
    for (uint32_t worker = 0; worker < job.workers; ++worker) {
      job.walks.push_back(walk_of(image, worker, job.workers));
    }
  }
  running->dispatcher.emplace(job);
  if (!self.pool.grow(job.threads)) return refuse(LaunchStatus::kNoThreads);

  const auto begin = Clock::now();
  auto next_poll = begin + kPollEvery;
  const auto elapsed_ns = [begin] {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
  };
  Watch watch(job, begin);
  const auto look = [&](Clock::time_point now) {
    if (job.stopped()) return;
    watch.look(now, options.timeout_s);
    if (job.ended_as(LaunchStatus::kTimedOut) || job.ended_as(LaunchStatus::kGroupEnded)) {
      job.outcome.cores = standing(job, elapsed_ns());
    }
    if (options.interrupted != nullptr && !job.stopped() && options.interrupted(options.context)) {
      job.end(LaunchStatus::kInterrupted);
    }
  };
  self.run(&job);
  self.pool.start(job);
  const bool left = attend(self.pool, *running, look, next_poll);
  if (left && options.peers != nullptr && !job.stopped()) {
    Arrivals arrivals(job.views[0], *job.ranks[0].image);
    Backoff backoff(job.may_spin);
    while (arrivals.missing() != kNone && !job.stopped()) {
      backoff.wait();
      const auto now = Clock::now();
      if (now < next_poll) continue;
      next_poll = now + kPollEvery;
      look(now);
      if (job.stopped()) job.outcome.cores.push_back(arrivals.blocked(options.peers->epoch, elapsed_ns()));
    }
    watch.last_look();
  }
  self.run(nullptr);
  job.outcome.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  if (!left) {
    self.hung = std::move(running);
    return job.outcome;
  }

  for (RankLaunch& rank : job.ranks) {
    if (job.stopped()) {
      rank.workspace->reset(0);
    } else {
      finish(rank, running->words);
    }
  }
  return std::move(job.outcome);
}

bool close_engine() {
  Engine& self = engine();
  self.closed = true;
  {
    const std::lock_guard lock(self.job_mutex);
    if (self.job != nullptr) self.job->end(LaunchStatus::kClosed);
  }
  while (!self.turn.take(kPollEvery)) {
  }
  const TurnGuard turn{self.turn};
  if (!self.free()) return false;
  self.pool.join();
  return true;
}

bool settled() {
  Engine& self = engine();
  if (!self.turn.take(Clock::duration::zero())) return true;  // a launch goes on: the engine has taken it
  const TurnGuard turn{self.turn};
  return self.free();
}

uint32_t worker_threads() { return engine().pool.size(); }

}  // namespace hyper_mpmd
