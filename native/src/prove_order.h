// The order of a world's tasks: who has ended before a task starts, by a clock a queue.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "hyper_mpmd/prove.h"
#include "prove_memory.h"

namespace hyper_mpmd::prove {

// The plans, and numbers for what they have together: a chain is a queue that has tasks, counted through all ranks.
struct Scene {
  explicit Scene(std::span<const PlanView> plans);

  struct Chain {
    uint32_t rank, queue, begin, end;
  };
  std::span<const PlanView> plans;
  bool world;  // the plans of all ranks
  std::vector<Chain> chains;
  std::vector<uint32_t> rank_begin;  // [rank] its first chain; one more at the end
  std::vector<uint32_t> local;       // [rank] its events before the first one of another rank
  std::vector<uint64_t> event_begin, task_begin;

  const PlanView& plan(uint32_t rank) const { return plans[world ? rank : 0]; }
  size_t index(uint32_t rank) const { return world ? rank : 0; }
  bool has(uint32_t rank) const { return world || rank == plans[0].rank; }
  uint64_t event(uint32_t rank, uint32_t number) const { return event_begin[index(rank)] + number; }
  // The event that counts a word of a rank's heap, kNone if there is none.
  uint32_t event_of_word(uint32_t rank, uint32_t word) const;
  std::pair<uint32_t, uint32_t> event_at(uint64_t number) const;  // rank, number there
  uint32_t task_at(Place place) const { return chains[place.chain].begin + place.position - 1; }

 private:
  std::vector<std::vector<std::pair<uint32_t, uint32_t>>> words_;  // [rank] (word, event), by word
};

inline constexpr uint32_t kSeveral = kNone - 1;

// An event as the proof goes on.
struct EventState {
  uint32_t have = 0;          // signals so far
  uint32_t waiters = 0;       // waits for it that are still to come
  uint32_t clock = kNone;     // what its signallers have seen, if anybody will ask
  uint32_t source = kNone;    // the rank that signals it; kSeveral
  Place signaller{kNone, 0};  // the last one so far
  uint32_t standing = kNone;  // the first chain that waits for it now
  bool credit = false;        // raised by a rank that has ended its launch
  bool partial = false;       // some wait for less than all signals
  bool some = false;          // and for more than none: which of them came says what has ended
};

// Counts signals and waits of every event. What does not add up goes to the verdict.
bool count_signals(const Scene& scene, std::vector<EventState>& events, Verdict& verdict);

// The shortest circle among chains that stand, each at its task next[chain].
std::vector<Standing> shortest_circle(const Scene& scene, const std::vector<EventState>& events,
                                      const std::vector<uint32_t>& next);

}  // namespace hyper_mpmd::prove
