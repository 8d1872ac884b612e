// What makes the search small, and why it loses nothing.
//
// Whether a task may start depends only on which tasks have ended, and more ended tasks never take leave away: counters
// only grow, and what a task of launch n needs is a number fixed beforehand. So
//
// (1) A state is the set of tasks that have ended, which is one position a queue. Tasks that run are left out: a task
//     that may start may start in every later state too until it does, so two tasks run at once in some execution
//     exactly if both may start in some state. One that ends between them can be taken to have ended before or after.
// (2) Reachable states are closed under union (what led to one still works beside the other). So all executions get
//     equally far: either each comes to its end or none does, and one run tells. A hang is found without a search.
// (3) By the same union, two tasks that come in either order may also run at once: where one goes first neither needs
//     the other's end, so unite the two states from which they started. To find overlaps is to find all races.
// (4) And two tasks a and b may both start in some state exactly if they may in the largest one reachable without
//     either: run everything else as far as it goes and look. That is the method of pairs. No number of states stops
//     it.
//
// Where all ranks share a process they end a launch together, which only adds order: its races are among those of one
// process a rank, but not its hangs (a wait for the credit of this very launch), so a hang is looked for in both ways.
#include "hyper_mpmd/explore.h"

#include <cstring>
#include <optional>

#include "explore_world.h"

namespace hyper_mpmd::explore {

namespace {

constexpr uint32_t kNoLimit = 0xffffffffu;

// One run of the world: how far each queue has come, and the counters.
class Run {
 public:
  Run(const World& world, uint32_t launches)
      : positions(world.queues.size(), 0),
        limits(world.queues.size(), kNoLimit),
        counters(world.counters.size(), 0),
        world_(world),
        launches_(launches) {}

  std::vector<uint32_t> positions;  // [queue]: tasks ended, over all launches
  std::vector<uint32_t> limits;     // [queue]: tasks that may end
  std::vector<uint32_t> counters;

  uint32_t end_of(uint32_t q) const { return launches_ * static_cast<uint32_t>(world_.queues[q].tasks.size()); }
  bool has_next(uint32_t q) const { return positions[q] < end_of(q); }
  uint32_t number_of_next(uint32_t q) const {
    const Queue& queue = world_.queues[q];
    return queue.tasks[positions[q] % queue.tasks.size()];
  }
  const Task& next(uint32_t q) const { return world_.tasks[number_of_next(q)]; }
  uint32_t launch_of_next(uint32_t q) const {
    return positions[q] / static_cast<uint32_t>(world_.queues[q].tasks.size());
  }
  Moment moment(uint32_t q) const { return {world_.queues[q].rank, next(q).number, launch_of_next(q)}; }

  // What the next task of a queue that has one lacks first; nothing if it may start.
  std::optional<Stuck> lacks(uint32_t q) const {
    const uint32_t launch = launch_of_next(q);
    for (const Need& need : next(q).needs) {
      const uint32_t base = launch * need.a_launch;
      if (static_cast<int32_t>(counters[need.counter] - (base + need.threshold)) < 0) {
        return Stuck{moment(q), need.event, need.launch_record, counters[need.counter] - base, need.threshold};
      }
    }
    return std::nullopt;
  }
  bool may_start(uint32_t q) const { return has_next(q) && !lacks(q); }

  void end_next(uint32_t q) {
    for (const uint32_t counter : next(q).signals) ++counters[counter];
    ++positions[q];
  }

  // Run all queues as far as their limits and each other let them; the tasks that end are added to `order`.
  void go_on(std::vector<Moment>* order = nullptr) {
    for (bool moved = true; moved;) {
      moved = false;
      for (uint32_t q = 0; q < positions.size(); ++q) {
        while (positions[q] < limits[q] && may_start(q)) {
          if (order != nullptr) order->push_back(moment(q));
          end_next(q);
          moved = true;
        }
      }
    }
  }

 private:
  const World& world_;
  uint32_t launches_;
};

bool find_hang(const World& world, uint32_t launches, Verdict& verdict) {
  Run run(world, launches);
  std::vector<Moment> order;
  run.go_on(&order);
  verdict.states += order.size() + 1;
  for (uint32_t q = 0; q < run.positions.size(); ++q) {
    if (run.has_next(q)) verdict.stuck.push_back(*run.lacks(q));
  }
  if (verdict.stuck.empty()) return false;
  verdict.kind = Kind::kHang;
  verdict.ended = std::move(order);
  return true;
}

// After a launch that came to its end each counter has had all its signals, whatever their order.
bool find_stale(const World& world, Verdict& verdict) {
  for (const Counter& counter : world.counters) {
    if (!counter.is_event || counter.signals == counter.a_launch) continue;
    verdict.stale.push_back({counter.rank, counter.event, counter.word, counter.signals, counter.a_launch});
  }
  if (verdict.stale.empty()) return false;
  verdict.kind = Kind::kStaleCounter;
  return true;
}

// Whether some two tasks that may start in this state conflict.
bool clash_in(const World& world, const Run& run, const std::vector<uint32_t>& startable, Verdict& verdict) {
  for (size_t i = 0; i < startable.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const uint32_t p = startable[j], q = startable[i];
      const uint32_t a = run.number_of_next(p), b = run.number_of_next(q);
      if (!world.conflict(a, b)) continue;
      Clash clash = world.clash(a, b);
      clash.first.launch = run.launch_of_next(p);
      clash.second.launch = run.launch_of_next(q);
      verdict.clashes.push_back(clash);
      verdict.kind = Kind::kRace;
      return true;
    }
  }
  return false;
}

// The states found so far, each once: positions side by side, and where each came from.
class Found {
 public:
  explicit Found(size_t queues) : queues_(queues), slots_(1024, kNone) {}

  size_t size() const { return from_.size(); }
  const uint16_t* operator[](size_t state) const { return positions_.data() + state * queues_; }

  // Adds a state that was reached from `from` by ending a task of queue `moved`, unless it is known.
  void add(const uint16_t* positions, uint32_t from, uint32_t moved) {
    if (2 * (size() + 1) > slots_.size()) grow();
    size_t slot = hash(positions) & (slots_.size() - 1);
    while (slots_[slot] != kNone) {
      if (std::memcmp((*this)[slots_[slot]], positions, queues_ * sizeof(uint16_t)) == 0) return;
      slot = (slot + 1) & (slots_.size() - 1);
    }
    slots_[slot] = static_cast<uint32_t>(size());
    positions_.insert(positions_.end(), positions, positions + queues_);
    from_.push_back({from, moved});
  }

  // The queues whose tasks ended on the way to a state, in order.
  std::vector<uint32_t> way_to(uint32_t state) const {
    std::vector<uint32_t> way;
    for (; from_[state].first != kNone; state = from_[state].first) way.push_back(from_[state].second);
    std::reverse(way.begin(), way.end());
    return way;
  }

 private:
  uint64_t hash(const uint16_t* positions) const {
    uint64_t h = 0x9e3779b97f4a7c15u;
    for (size_t q = 0; q < queues_; ++q) h = (h ^ positions[q]) * 0xff51afd7ed558ccdu, h ^= h >> 32;
    return h;
  }

  void grow() {
    std::vector<uint32_t> old(2 * slots_.size(), kNone);
    old.swap(slots_);
    for (const uint32_t state : old) {
      if (state == kNone) continue;
      size_t slot = hash((*this)[state]) & (slots_.size() - 1);
      while (slots_[slot] != kNone) slot = (slot + 1) & (slots_.size() - 1);
      slots_[slot] = state;
    }
  }

  size_t queues_;
  std::vector<uint16_t> positions_;
  std::vector<std::pair<uint32_t, uint32_t>> from_;
  std::vector<uint32_t> slots_;  // open addressing; kNone is free
};

// Visits the states of a run, breadth first, and looks for a clash in each.
void search_states(const World& world, uint32_t launches, uint64_t cap, Verdict& verdict) {
  const size_t queues = world.queues.size();
  std::vector<uint16_t> positions(queues, 0);
  Found found(queues);
  found.add(positions.data(), kNone, kNone);
  std::vector<uint32_t> startable;
  const Run start(world, launches);
  for (uint32_t state = 0; state < found.size(); ++state) {
    if (state >= cap) {
      verdict.kind = Kind::kUnfinished;
      return;
    }
    ++verdict.states;
    // Replayed in any order that works: what a state is depends on the positions alone.
    Run run = start;
    for (uint32_t q = 0; q < queues; ++q) run.limits[q] = found[state][q];
    run.go_on();
    startable.clear();
    for (uint32_t q = 0; q < queues; ++q) {
      if (run.may_start(q)) startable.push_back(q);
    }
    if (clash_in(world, run, startable, verdict)) {
      Run again = start;
      for (const uint32_t q : found.way_to(state)) {
        verdict.ended.push_back(again.moment(q));
        again.end_next(q);
      }
      return;
    }
    for (const uint32_t q : startable) {
      positions.assign(found[state], found[state] + queues);
      ++positions[q];
      found.add(positions.data(), state, q);
    }
  }
}

// The first clash of two tasks that may both be running, looked for pair by pair.
void search_pairs(const World& world, uint32_t launches, Verdict& verdict) {
  struct Place {
    uint32_t queue, position;
  };
  std::vector<Place> place(world.tasks.size());
  for (uint32_t q = 0; q < world.queues.size(); ++q) {
    for (uint32_t i = 0; i < world.queues[q].tasks.size(); ++i) place[world.queues[q].tasks[i]] = {q, i};
  }
  const Run start(world, launches);
  const auto both_start = [&](const std::vector<uint32_t>& limits, uint32_t p, uint32_t q, std::vector<Moment>* order) {
    Run run = start;
    run.limits = limits;
    run.go_on(order);
    ++verdict.states;
    const std::vector<uint32_t> startable{p, q};
    const bool reached = run.positions[p] == limits[p] && run.positions[q] == limits[q];
    return reached && run.may_start(p) && run.may_start(q) && clash_in(world, run, startable, verdict);
  };
  for (uint32_t b = 0; b < world.tasks.size(); ++b) {
    for (uint32_t a = 0; a < b; ++a) {
      if (!world.conflict(a, b) || place[a].queue == place[b].queue) continue;
      const bool same_rank = world.tasks[a].rank == world.tasks[b].rank;
      for (uint32_t n = 0; n < launches * launches; ++n) {
        const uint32_t launch_a = n / launches, launch_b = n % launches;
        if (same_rank && launch_a != launch_b) continue;  // the launches of a rank come one after the other
        const uint32_t p = place[a].queue, q = place[b].queue;
        std::vector<uint32_t> limits(world.queues.size());
        for (uint32_t i = 0; i < limits.size(); ++i) limits[i] = start.end_of(i);
        limits[p] = launch_a * static_cast<uint32_t>(world.queues[p].tasks.size()) + place[a].position;
        limits[q] = launch_b * static_cast<uint32_t>(world.queues[q].tasks.size()) + place[b].position;
        if (!both_start(limits, p, q, nullptr)) continue;
        // Leave out what the two do not need, to show no more than that.
        for (uint32_t i = 0; i < limits.size(); ++i) {
          for (; i != p && i != q && limits[i] > 0; --limits[i]) {
            std::vector<uint32_t> fewer = limits;
            --fewer[i];
            verdict.clashes.clear();
            if (!both_start(fewer, p, q, nullptr)) break;
          }
        }
        verdict.clashes.clear();
        both_start(limits, p, q, &verdict.ended);
        return;
      }
    }
  }
}

}  // namespace

Verdict explore(std::span<const Sections> plans, uint32_t launches, uint64_t cap, Method method) {
  if (launches == 0 || launches > kMaxLaunches || cap > kMaxCap) {
    throw std::invalid_argument("launches are 1 to " + std::to_string(kMaxLaunches) + ", states at most " +
                                std::to_string(kMaxCap));
  }
  const World world(plans, false), together(plans, true);
  Verdict verdict;
  if (!world.overflows.empty()) {
    verdict.kind = Kind::kOverflow;
    verdict.clashes.push_back(world.overflows.front());
  } else if (find_hang(world, launches, verdict) || find_hang(together, launches, verdict) ||
             find_stale(world, verdict)) {
    return verdict;
  } else if (method == Method::kStates) {
    search_states(world, launches, cap, verdict);
  } else {
    search_pairs(world, launches, verdict);
  }
  return verdict;
}

}  // namespace hyper_mpmd::explore
