// One proof as it goes on: what prove.cpp runs through once, and prove_between.cpp looks at when all has run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <span>
#include <unordered_map>
#include <vector>

#include "hyper_mpmd/prove.h"
#include "prove_memory.h"
#include "prove_order.h"

namespace hyper_mpmd::prove {

class Proof {
 public:
  Proof(std::span<const PlanView> plans, Verdict& verdict)
      : scene_(plans),
        verdict_(verdict),
        several_(scene_.world && plans.size() > 1),
        editions_(scene_.chains.size() + plans.size()),
        width_((editions_ + plans.size() + 7) / 8 * 8) {}

  void run();

 private:
  // Positions on each chain up to which all has ended; behind them a 1 for each rank whose launch before this one has
  // ended; behind those an edition for each rank: positions on its chains that have one edition are the same (0: none
  // has ended), so that clocks are joined rank by rank, and only where they differ.
  using Tick = int32_t;
  struct Launch {
    uint32_t left = 0;    // tasks to come
    uint32_t closed = 0;  // launches before it that have not ended
    uint32_t clock = kNone;
    uint32_t standing = kNone;  // the first chain that waits for it
    std::vector<uint32_t> after;
  };
  // A task that touches memory which peers write, and the ranks whose earlier launch had ended when it started.
  struct Touch {
    uint32_t chain, position;
    size_t ended;  // index of its words in ended_
  };

  bool map_memory();
  void advance(uint32_t chain);
  bool may_start(uint32_t chain, const TaskRecord& task);
  void join_waits(uint32_t chain, const TaskRecord& task);
  void join_some(uint32_t chain, const TaskRecord& task, const WaitRecord& wait, uint32_t threshold);
  void touch(uint32_t chain, const TaskRecord& task);
  void finish(uint32_t chain, const TaskRecord& task);
  void end_of_launch(const PlanView& plan, uint32_t launch);
  bool between_launches();
  bool host_reads();
  bool ordered_across(Place first, const Touch& second) const;

  Tick* clock(uint32_t chain) { return clocks_.data() + chain * width_; }
  Tick* stored(uint32_t index) { return store_.data() + index * width_; }
  uint32_t take_clock();
  void join(Tick* __restrict into, const Tick* __restrict from);  // of two different clocks
  Tick fresh_edition() { return static_cast<Tick>(++edition_); }
  void wake(uint32_t& first) {
    for (uint32_t c = first; c != kNone; c = link_[c]) ready_.push_back(c);
    first = kNone;
  }
  template <class Visit>
  bool each_rect(const PlanView& plan, const TaskRecord& task, Visit&& visit) const;
  void race(const Touch& second, Place first, const AccessRecord& box, bool written, const Rect& rect, bool next);

  Scene scene_;
  Verdict& verdict_;
  const bool several_;
  const size_t editions_, width_;  // where the editions of a clock begin, and its end
  uint32_t edition_ = 0;           // the last one
  std::vector<EventState> events_;
  std::vector<std::vector<Launch>> launches_;
  std::vector<MemoryMap> maps_;
  std::vector<Memory> memories_;
  std::vector<Tick> clocks_, store_;
  std::vector<uint32_t> free_, next_, link_, joined_;
  std::deque<uint32_t> ready_;
  std::deque<uint32_t> patient_;  // chains whose next task could start before all signals of an event that it waits for
  uint32_t allowed_ = kNone;      // the one of them that starts now
  std::unordered_map<uint64_t, std::vector<std::vector<Tick>>> some_;  // event: what each of its signals has seen
  std::vector<std::vector<Touch>> touches_;                            // [memory that peers write]
  std::vector<uint64_t> ended_;
  size_t words_ = 0;                     // of 64 ranks, for each touch
  std::vector<std::vector<Tick>> ends_;  // [rank] its clock at the end of the launch
};

// Call visit(memory, box, written, rect) for each piece of memory that the task touches and anybody writes.
template <class Visit>
bool Proof::each_rect(const PlanView& plan, const TaskRecord& task, Visit&& visit) const {
  const uint32_t reads = plan.ops[task.op].read_count;
  for (uint32_t i = 0; i < task.access_count; ++i) {
    const AccessRecord& box = plan.accesses[task.access_begin + i];
    if (!scene_.has(box.rank)) continue;
    const MemoryMap& map = maps_[scene_.index(box.rank)];
    const uint32_t memory = map.of(box.tensor);
    if (memory == kNone) continue;
    if (!map.rects(box, [&](const Rect& rect) { return visit(memory, box, i >= reads, rect); })) return false;
  }
  return true;
}

}  // namespace hyper_mpmd::prove
