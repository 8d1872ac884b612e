// Where every core of a launch stands, as seen by a thread that looks on.
#pragma once

#include <vector>

#include "engine_job.h"

namespace hyper_mpmd {

// Looks on with plain acquire loads, past every test mode.
struct Onlooker {
  static uint32_t load_acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
  static uint32_t load_cached(const uint32_t* word) { return *word; }
};

inline CoreRecord core_record(const Job& job, uint32_t thread, size_t place, int64_t elapsed_ns) {
  const RankView& view = job.views[thread / job.workers];
  const PlanImage& image = *job.ranks[thread / job.workers].image;
  const Walk& walk = job.walks[thread];
  const uint32_t number = walk.queues[place];
  const QueueRecord& queue = image.queues[number];
  const uint32_t inside = Onlooker::load_acquire(&walk.cursors[place].inside);
  const uint32_t next = Onlooker::load_acquire(&walk.cursors[place].next);
  CoreRecord core{};
  core.rank = image.rank;
  core.queue = number;
  core.kind = queue.kind;
  core.core = queue.core;
  core.worker = thread % job.workers;
  core.event = kNone;
  core.ended = next - queue.begin;
  core.tasks = queue.count;
  core.launch = job.options.peers != nullptr ? job.options.peers->epoch : 0;
  core.elapsed_ns = elapsed_ns;
  core.task = inside != kNone ? inside : next;
  if (inside != kNone) {
    core.state = static_cast<uint32_t>(CoreState::kRunning);
    return core;
  }
  if (next == queue.begin + queue.count) {
    core.state = static_cast<uint32_t>(CoreState::kDone);
    core.task = kNone;
    return core;
  }
  const TaskRecord& task = image.tasks[next];
  core.state = static_cast<uint32_t>(CoreState::kWaiting);
  if (view.gates != nullptr && Onlooker::load_acquire(&view.gates[task.launch]) == 0) return core;
  Onlooker onlooker;
  for (uint32_t w = 0; w < task.wait_count; ++w) {
    const WaitRecord& wait = image.waits[task.wait_begin + w];
    const uint32_t base = event_base(onlooker, view, wait.event);
    const uint32_t count = event_count(onlooker, view, wait.event);
    if (reached(count, base + wait.threshold)) continue;
    core.event = wait.event;
    core.have = count - base;
    core.need = wait.threshold;
    return core;
  }
  core.state = static_cast<uint32_t>(CoreState::kReady);
  return core;
}

inline std::vector<CoreRecord> standing(const Job& job, int64_t elapsed_ns) {
  std::vector<CoreRecord> cores;
  for (uint32_t thread = 0; thread < job.threads; ++thread) {
    for (size_t place = 0; place < job.walks[thread].queues.size(); ++place) {
      cores.push_back(core_record(job, thread, place, elapsed_ns));
    }
  }
  return cores;
}

inline std::vector<CoreRecord> cores_inside(const Job& job) {
  std::vector<CoreRecord> cores = standing(job, 0);
  std::erase_if(cores, [](const CoreRecord& core) { return core.state != static_cast<uint32_t>(CoreState::kRunning); });
  return cores;
}

}  // namespace hyper_mpmd
