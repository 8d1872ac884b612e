// The worker loop: take the next task of a queue, wait for its events, run it, signal. Written once, against a small
// Platform, without STL, exceptions, recursion or virtual calls, so that a device compiler can take it as it is.
//
// A Platform has:
//   uint32_t load_acquire(const uint32_t*)   past every cache; what was written before the matching add is visible
//   after uint32_t load_cached(const uint32_t*)    a word that nobody writes while the launch runs void
//   add_release(uint32_t*)              adds one; everything written before it is visible to whoever sees it void
//   publish(uint32_t*, uint32_t)        for whoever looks on: where this worker stands, in a line of its own bool
//   run(const TaskRecord&, uint32_t task)   false: the launch fails bool stopped()                           the launch
//   is being ended from elsewhere bool sends(uint32_t task, uint32_t i)    true; a test drops a signal here void
//   pause()                             nothing was ready; called again and again until something is void progress()
//   something ran since the last pause void blocked(uint32_t task), started(uint32_t task), finished(uint32_t task) for
//   a trace; may be empty
#pragma once

#include <cstdint>

#include "hyper_mpmd/plan.h"

namespace hyper_mpmd {

// One local event: how often it was signalled since the workspace was made, and that number when this launch began.
struct EventCell {
  uint32_t count;
  uint32_t base;
};

// All that one rank's workers read and write while a launch runs. Nothing here is owned.
struct RankView {
  const TaskRecord* tasks;
  const WaitRecord* waits;
  const SignalRecord* signals;
  const EventRecord* events;
  uint32_t rank;
  uint32_t local_events;  // events [0, local_events) have cells; the others are words of the heap
  EventCell* cells;
  const uint32_t* heap;         // words that peers write
  const uint32_t* heap_base;    // [word], when this launch began
  uint32_t* const* peer_heaps;  // [rank]
  const uint32_t* gates;        // [launch], nonzero once the host has dispatched it; null: all open
  uint32_t* launch_done;        // [launch], tasks finished; null where gates is
};

// Where a worker stands in one queue. Only that worker writes here; others may look on.
struct alignas(64) Cursor {
  uint32_t next;
  uint32_t end;
  uint32_t wait;            // waits of the next task that are already met
  uint32_t inside = kNone;  // the task that has started and not yet signalled; others read it with `next`
};

// Whether counter `have` has grown to `need`. Counters only grow and wrap around, hence the signed difference.
inline bool reached(uint32_t have, uint32_t need) { return static_cast<int32_t>(have - need) >= 0; }

template <class Platform>
uint32_t event_count(Platform& platform, const RankView& view, uint32_t event) {
  if (event < view.local_events) return platform.load_acquire(&view.cells[event].count);
  return platform.load_acquire(&view.heap[view.events[event].slot]);
}

template <class Platform>
uint32_t event_base(Platform& platform, const RankView& view, uint32_t event) {
  if (event < view.local_events) return platform.load_cached(&view.cells[event].base);
  return platform.load_cached(&view.heap_base[view.events[event].slot]);
}

// Whether the next task of the queue may run. Waits once met are not looked at again.
template <class Platform>
bool ready(Platform& platform, const RankView& view, Cursor& cursor) {
  const TaskRecord& task = view.tasks[cursor.next];
  if (view.gates != nullptr && platform.load_acquire(&view.gates[task.launch]) == 0) return false;
  while (cursor.wait < task.wait_count) {
    const WaitRecord wait = view.waits[task.wait_begin + cursor.wait];
    const uint32_t need = event_base(platform, view, wait.event) + wait.threshold;
    if (!reached(event_count(platform, view, wait.event), need)) return false;
    ++cursor.wait;
  }
  return true;
}

template <class Platform>
void signal_all(Platform& platform, const RankView& view, uint32_t number) {
  const TaskRecord& task = view.tasks[number];
  for (uint32_t i = 0; i < task.signal_count; ++i) {
    if (!platform.sends(number, i)) continue;
    const SignalRecord signal = view.signals[task.signal_begin + i];
    if (signal.rank == view.rank) {
      platform.add_release(&view.cells[signal.event].count);
    } else {
      platform.add_release(&view.peer_heaps[signal.rank][signal.event]);
    }
  }
  if (view.launch_done != nullptr) platform.add_release(&view.launch_done[task.launch]);
}

// Walk `count` queues to their ends. A worker with several polls their heads and never blocks on one; it takes one task
// of a queue at a time, so that queues advance together. Returns false if a task failed or the launch was stopped.
template <class Platform>
bool walk(Platform& platform, const RankView& view, Cursor* cursors, uint32_t count) {
  for (;;) {
    bool moved = false, left = false;
    for (uint32_t q = 0; q < count; ++q) {
      Cursor& cursor = cursors[q];
      while (cursor.next != cursor.end) {
        if (platform.stopped()) return false;
        if (!ready(platform, view, cursor)) {
          platform.blocked(cursor.next);
          left = true;
          break;
        }
        const uint32_t number = cursor.next;
        platform.publish(&cursor.inside, number);
        platform.started(number);
        if (!platform.run(view.tasks[number], number)) return false;
        platform.finished(number);
        if (platform.stopped()) return false;  // whoever ended the launch may have given up waiting for this task
        signal_all(platform, view, number);
        cursor.wait = 0;
        platform.publish(&cursor.next, number + 1);
        platform.publish(&cursor.inside, kNone);
        moved = true;
        if (count > 1) {
          left = left || cursor.next != cursor.end;
          break;
        }
      }
    }
    if (!left) return true;
    if (moved) {
      platform.progress();
    } else {
      platform.pause();
    }
  }
}

}  // namespace hyper_mpmd
