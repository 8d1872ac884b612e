// The proof: run all tasks in some order that waits allow, keep a clock a queue, and hold each access against whoever
// touched the same cells before. Nothing that a task does can keep another from running for ever (counters only grow),
// so one such order stands for all: if it gets stuck every order does, and what the clocks say of it holds in each.
#include "hyper_mpmd/prove.h"

#include <algorithm>

#include "prove_run.h"

namespace hyper_mpmd {

namespace prove {

bool Proof::map_memory() {
  uint32_t count = 0;
  for (const PlanView& plan : scene_.plans) {
    maps_.emplace_back(plan, count);
    count += maps_.back().count();
  }
  memories_.resize(count);
  touches_.resize(count);
  for (const PlanView& plan : scene_.plans) {
    for (const TaskRecord& task : plan.tasks) {
      each_rect(plan, task, [&](uint32_t memory, const AccessRecord& box, bool written, const Rect& rect) {
        if (written) memories_[memory].announce(rect);
        memories_[memory].from_peers |= box.rank != plan.rank;
        return true;
      });
    }
  }
  for (Memory& memory : memories_) {
    if (memory.build()) continue;
    verdict_.unsafe = Unsafe::kRecord;
    verdict_.text = "the boxes that tasks write cut a tensor into more pieces than a proof can hold";
    return false;
  }
  return true;
}

uint32_t Proof::take_clock() {
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(store_.size() / std::max<size_t>(width_, 1)));
    store_.resize(store_.size() + width_);
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  return index;
}

void Proof::join(Tick* __restrict into, const Tick* __restrict from) {
  for (size_t rank = 0; rank < scene_.plans.size(); ++rank) {
    const Tick theirs = from[editions_ + rank];
    Tick& mine = into[editions_ + rank];
    if (theirs == 0 || theirs == mine) continue;
    // Without branches, so that a compiler takes several at once: the highest bit of a difference says which is less.
    const size_t begin = scene_.rank_begin[rank], end = scene_.rank_begin[rank + 1];
    Tick more = 0, less = 0;
    for (size_t i = begin; i < end; ++i) {
      const Tick a = into[i], b = from[i];
      more |= a - b;
      less |= b - a;
      into[i] = std::max(a, b);
    }
    if (more < 0) mine = less < 0 ? fresh_edition() : theirs;
  }
  for (size_t i = scene_.chains.size(); i < editions_; ++i) into[i] = std::max(into[i], from[i]);
}

bool Proof::may_start(uint32_t chain, const TaskRecord& task) {
  const uint32_t rank = scene_.chains[chain].rank;
  const PlanView& plan = scene_.plan(rank);
  if (plan.dispatched()) {
    Launch& launch = launches_[scene_.index(rank)][task.launch];
    if (launch.closed != 0) {
      link_[chain] = launch.standing;
      launch.standing = chain;
      return false;
    }
  }
  bool patient = false;
  for (const WaitRecord& wait : plan.waits_of(task)) {
    EventState& event = events_[scene_.event(rank, wait.event)];
    if (event.have >= wait.threshold) {
      patient |= event.some && 0 < wait.threshold && event.have < plan.events[wait.event].threshold;
      continue;
    }
    link_[chain] = event.standing;
    event.standing = chain;
    return false;
  }
  if (patient && allowed_ != chain) {
    // Let all signals come that can without it: what the task has surely seen depends on them.
    patient_.push_back(chain);
    return false;
  }
  return true;
}

void Proof::join_waits(uint32_t chain, const TaskRecord& task) {
  const auto& [rank, queue, begin, end] = scene_.chains[chain];
  const PlanView& plan = scene_.plan(rank);
  Tick* now = clock(chain);
  const bool first_of_launch = next_[chain] == begin || plan.tasks[next_[chain] - 1].launch != task.launch;
  if (plan.dispatched() && first_of_launch) {
    const LaunchRecord& launch = plan.launches[task.launch];
    for (const uint32_t before : plan.dependencies.subspan(launch.dependency_begin, launch.dependency_count)) {
      const uint32_t index = launches_[scene_.index(rank)][before].clock;
      if (index != kNone) join(now, stored(index));
    }
  }
  const uint32_t local = scene_.local[scene_.index(rank)];
  for (const WaitRecord& wait : plan.waits_of(task)) {
    const uint64_t number = scene_.event(rank, wait.event);
    EventState& event = events_[number];
    --event.waiters;
    const bool one_source = event.source < kSeveral;
    // What a rank signals in this launch, or its credit of the one before, shows that its launch before has ended.
    if (several_ && wait.event >= local && one_source && event.credit == (wait.threshold == 0)) {
      now[scene_.chains.size() + event.source] = 1;
    }
    // Signals of several ranks may be of two launches: no order.
    if (one_source && event.some && 0 < wait.threshold && wait.threshold < plan.events[wait.event].threshold) {
      join_some(chain, task, wait, plan.events[wait.event].threshold);
    }
    const bool all = wait.threshold == plan.events[wait.event].threshold && one_source;
    if (all && event.clock != kNone && joined_[chain] != number) {
      // Whoever has seen the end of a task has seen all that the task had seen.
      const auto& [signaller, position] = event.signaller;
      if (wait.threshold != 1 || static_cast<uint32_t>(now[signaller]) < position) join(now, stored(event.clock));
      joined_[chain] = static_cast<uint32_t>(number);
    }
    if (event.waiters == 0 && event.clock != kNone) {
      free_.push_back(event.clock);
      event.clock = kNone;
    }
  }
}

// Of an event's signals any `wait.threshold` are enough. A task has surely ended before this one starts if too few come
// without it. Signals that have not come yet come after this task if nothing but this task could start now, or if they
// are queued behind it; others are taken to come whatever else has ended.
void Proof::join_some(uint32_t chain, const TaskRecord& task, const WaitRecord& wait, uint32_t threshold) {
  const uint32_t rank = scene_.chains[chain].rank;
  const PlanView& plan = scene_.plan(rank);
  const std::vector<std::vector<Tick>>& seen = some_[scene_.event(rank, wait.event)];
  uint64_t unknown = ready_.empty() && patient_.empty() ? 0 : threshold - seen.size();
  for (const TaskRecord* later = &task; later != plan.tasks.data() + scene_.chains[chain].end && unknown; ++later) {
    for (const SignalRecord& signal : plan.signals_of(*later)) {
      if (signal.rank == rank && signal.event == wait.event && wait.event < scene_.local[scene_.index(rank)]) --unknown;
    }
  }
  if (unknown >= wait.threshold || unknown + seen.size() < wait.threshold) return;
  const auto place = static_cast<ptrdiff_t>(wait.threshold - unknown - 1);
  std::vector<Tick> ticks(seen.size());
  for (size_t i = 0; i < editions_; ++i) {
    for (size_t s = 0; s < seen.size(); ++s) ticks[s] = seen[s][i];
    std::nth_element(ticks.begin(), ticks.begin() + place, ticks.end());
    clock(chain)[i] = std::max(clock(chain)[i], ticks[static_cast<size_t>(place)]);
  }
  for (size_t other = 0; other < scene_.plans.size(); ++other) clock(chain)[editions_ + other] = fresh_edition();
}

void Proof::race(const Touch& second, Place first, const AccessRecord& box, bool written, const Rect& rect, bool next) {
  verdict_.unsafe = Unsafe::kRace;
  RaceFault& fault = verdict_.race;
  const uint32_t rank = scene_.chains[second.chain].rank, before_rank = scene_.chains[first.chain].rank;
  const uint32_t before = scene_.task_at(first);
  fault.second = {rank, scene_.task_at({second.chain, second.position}), box.tensor, written};
  fault.next_launch = next;
  fault.memory_rank = box.rank;
  // The box of the first that meets it: one that writes, or any if the second writes.
  const PlanView& plan = scene_.plan(before_rank);
  const MemoryMap& map = maps_[scene_.index(box.rank)];
  each_rect(plan, plan.tasks[before], [&](uint32_t memory, const AccessRecord& other, bool writes, const Rect& where) {
    if (other.rank != box.rank || memory != map.of(box.tensor) || !where.meets(rect) || !(writes || written))
      return true;
    fault.first = {before_rank, before, other.tensor, writes};
    const AccessRecord met = map.box_of(box, {std::max(where.row, rect.row), std::min(where.row_end, rect.row_end),
                                              std::max(where.col, rect.col), std::min(where.col_end, rect.col_end)});
    fault.row = met.row;
    fault.rows = met.rows;
    fault.col = met.col;
    fault.cols = met.cols;
    return false;
  });
}

void Proof::touch(uint32_t chain, const TaskRecord& task) {
  const PlanView& plan = scene_.plan(scene_.chains[chain].rank);
  const Tick* now = clock(chain);
  const Place place{chain, next_[chain] - scene_.chains[chain].begin + 1};
  const auto earlier = [&](Place before) {
    ++verdict_.pairs;
    return before.chain == chain || static_cast<uint32_t>(now[before.chain]) >= before.position;
  };
  size_t noted = ~size_t{0};
  each_rect(plan, task, [&](uint32_t number, const AccessRecord& box, bool written, const Rect& rect) {
    Memory& memory = memories_[number];
    std::pair<Place, bool> culprit;
    const bool fine =
        written ? memory.write(rect, place, earlier, culprit) : memory.read(rect, place, earlier, culprit);
    if (!fine) {
      race({chain, place.position, 0}, culprit.first, box, written, rect, false);
      return false;
    }
    if (!several_ || !memory.from_peers) return true;
    if (noted == ~size_t{0}) {
      noted = ended_.size();
      ended_.resize(noted + words_);
      for (size_t rank = 0; rank < scene_.plans.size(); ++rank) {
        if (now[scene_.chains.size() + rank] != 0) ended_[noted + rank / 64] |= uint64_t{1} << rank % 64;
      }
    }
    auto& touches = touches_[number];
    if (touches.empty() || touches.back().chain != chain || touches.back().position != place.position) {
      touches.push_back({chain, place.position, noted});
    }
    return true;
  });
}

void Proof::end_of_launch(const PlanView& plan, uint32_t number) {
  for (const uint32_t after : launches_[scene_.index(plan.rank)][number].after) {
    Launch& launch = launches_[scene_.index(plan.rank)][after];
    if (--launch.closed == 0) wake(launch.standing);
  }
}

void Proof::finish(uint32_t chain, const TaskRecord& task) {
  const auto& [rank, queue, begin, end] = scene_.chains[chain];
  const PlanView& plan = scene_.plan(rank);
  Tick* now = clock(chain);
  now[chain] = static_cast<Tick>(next_[chain] - begin + 1);
  now[editions_ + scene_.index(rank)] = fresh_edition();
  for (const SignalRecord& signal : plan.signals_of(task)) {
    if (!scene_.has(signal.rank)) continue;
    const uint32_t number = signal.rank == rank ? signal.event : scene_.event_of_word(signal.rank, signal.event);
    EventState& event = events_[scene_.event(signal.rank, number)];
    ++event.have;
    event.signaller = {chain, static_cast<uint32_t>(now[chain])};
    if (event.some) some_[scene_.event(signal.rank, number)].emplace_back(now, now + width_);
    // The host of a rank waits for all that one other puts there, whether a task does or not.
    if (signal.rank != rank && event.source < kSeveral && !event.credit) join(ends_[signal.rank].data(), now);
    if (event.waiters != 0) {
      if (event.clock == kNone) {
        event.clock = take_clock();
        std::copy_n(now, width_, stored(event.clock));
      } else {
        join(stored(event.clock), now);
      }
    }
    const bool all = event.have == scene_.plan(signal.rank).events[number].threshold;
    if (event.standing != kNone && (all || event.partial)) wake(event.standing);
  }
  if (!plan.dispatched()) return;
  Launch& launch = launches_[scene_.index(rank)][task.launch];
  if (!launch.after.empty() && (next_[chain] + 1 == end || plan.tasks[next_[chain] + 1].launch != task.launch)) {
    if (launch.clock == kNone) {
      launch.clock = take_clock();
      std::copy_n(now, width_, stored(launch.clock));
    } else {
      join(stored(launch.clock), now);
    }
  }
  if (--launch.left == 0) end_of_launch(plan, task.launch);
}

// Run a few tasks of the chain, so that chains keep in step and few clocks are held.
void Proof::advance(uint32_t chain) {
  constexpr uint32_t kTurn = 8;
  const uint32_t end = scene_.chains[chain].end;
  const PlanView& plan = scene_.plan(scene_.chains[chain].rank);
  for (uint32_t turn = 0; next_[chain] != end; ++turn) {
    if (turn == kTurn) {
      ready_.push_back(chain);
      return;
    }
    const TaskRecord& task = plan.tasks[next_[chain]];
    if (!may_start(chain, task)) return;
    allowed_ = kNone;
    join_waits(chain, task);
    // After a race the order goes on without boxes: a hang is told first.
    if (verdict_.unsafe == Unsafe::kNothing) touch(chain, task);
    finish(chain, task);
    ++next_[chain];
  }
}

void Proof::run() {
  verdict_.world = scene_.world;
  verdict_.queues = scene_.chains.size();
  const size_t chains = scene_.chains.size();
  for (const PlanView& plan : scene_.plans) {
    verdict_.tasks += plan.tasks.size();
    verdict_.events += plan.events.size();
    verdict_.boxes += plan.accesses.size();
    verdict_.edges += plan.waits.size() + plan.signals.size() + plan.dependencies.size();
  }
  verdict_.edges += verdict_.tasks - std::min<uint64_t>(verdict_.tasks, chains);
  if (!count_signals(scene_, events_, verdict_) || !map_memory()) return;
  launches_.resize(scene_.plans.size());
  for (size_t p = 0; p < scene_.plans.size(); ++p) {
    const PlanView& plan = scene_.plans[p];
    if (!plan.dispatched()) continue;
    auto& launches = launches_[p];
    launches.resize(plan.launches.size());
    for (uint32_t i = 0; i < launches.size(); ++i) {
      const LaunchRecord& record = plan.launches[i];
      launches[i].left = record.task_count;
      for (const uint32_t before : plan.dependencies.subspan(record.dependency_begin, record.dependency_count)) {
        if (plan.launches[before].task_count == 0) continue;  // it has ended before it began
        launches[before].after.push_back(i);
        ++launches[i].closed;
      }
    }
  }
  words_ = (scene_.plans.size() + 63) / 64;
  ends_.assign(several_ ? scene_.plans.size() : 0, std::vector<Tick>(width_, 0));
  clocks_.assign(chains * width_, 0);
  link_.assign(chains, kNone);
  joined_.assign(chains, kNone);
  for (uint32_t c = 0; c < chains; ++c) {
    next_.push_back(scene_.chains[c].begin);
    if (several_) clock(c)[chains + scene_.index(scene_.chains[c].rank)] = 1;
    ready_.push_back(c);
  }
  while (!ready_.empty() || !patient_.empty()) {
    std::deque<uint32_t>& from = ready_.empty() ? patient_ : ready_;
    const uint32_t chain = from.front();
    from.pop_front();
    allowed_ = &from == &patient_ ? chain : kNone;
    advance(chain);
  }
  verdict_.bytes = (clocks_.capacity() + store_.capacity()) * sizeof(Tick) + events_.capacity() * sizeof(EventState) +
                   ended_.capacity() * sizeof(uint64_t);
  for (const Memory& memory : memories_) verdict_.bytes += memory.bytes();
  for (const auto& touches : touches_) verdict_.bytes += touches.capacity() * sizeof(Touch);
  for (uint32_t c = 0; c < chains; ++c) {
    if (next_[c] == scene_.chains[c].end) continue;
    verdict_.unsafe = Unsafe::kHang;
    verdict_.circle = shortest_circle(scene_, events_, next_);
    return;
  }
  if (!several_ || verdict_.unsafe != Unsafe::kNothing) return;
  for (size_t rank = 0; rank < scene_.plans.size(); ++rank) {
    for (uint32_t c = scene_.rank_begin[rank]; c < scene_.rank_begin[rank + 1]; ++c) join(ends_[rank].data(), clock(c));
  }
  if (host_reads()) between_launches();
}

}  // namespace prove

Verdict prove_plans(std::span<const PlanView> plans) {
  Verdict verdict;
  const auto refuse = [&](std::string text) {
    verdict.unsafe = Unsafe::kRecord;
    verdict.text = std::move(text);
    return verdict;
  };
  if (plans.empty()) return refuse("no plan to prove");
  for (const PlanView& plan : plans) {
    std::string what = plan.record_fault();
    if (!what.empty()) {
      return refuse(plans.size() > 1 ? "rank " + std::to_string(plan.rank) + ": " + what : what);
    }
    // Positions in a queue are counted with a sign.
    if (plan.tasks.size() > 0x7fffffffu) return refuse("more tasks on one rank than a proof can number");
  }
  if (plans.size() != plans[0].ranks && plans.size() != 1) return refuse("one plan, or those of all ranks, are proven");
  if (plans.size() > 1) {
    if (std::string what = world_record_fault(plans); !what.empty()) return refuse(std::move(what));
  }
  prove::Proof(plans, verdict).run();
  return verdict;
}

}  // namespace hyper_mpmd
