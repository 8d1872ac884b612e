// Proof that plans neither hang nor race, over two successive launches, or the smallest counter-example.
//
// A task starts when the task before it in its queue has ended, its launch is open (all it depends on have ended on
// this rank) and its waits are met; it touches its boxes from start to end, and its signals land at its end. A rank's
// launch n ends when its queues have ended and all has arrived that peers put there; then its host copies out what they
// put for the caller, gives every peer credit, and enters launch n + 1. Counters only grow, and a launch counts from
// the sum of the thresholds before it.
//
// Workers poll the queues they carry and never block on one. So if all tasks can run with a worker a queue they can
// with any number of workers: nothing in the proof depends on how many there are.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hyper_mpmd/plan_image.h"

namespace hyper_mpmd {

// The certificate, local and linear: each local event gets as many signals as its threshold, queues, events and
// launches have no circle, and (`hops`) no queue, event or launch leads down in hop level while what comes from another
// rank leads up. If it holds on every rank, no circle crosses ranks. For records without fault. Empty if it holds.
std::string certificate_fault(const PlanView& plan, bool hops = true);

enum class Unsafe : uint32_t {
  kNothing,  // proven
  kRecord,   // the records cannot be read: `text`
  kSignal,   // an event's threshold is not the number of its signals, or a wait can never be met: `signal`
  kHang,     // tasks that wait for one another in a circle: `circle`
  kRace,     // two tasks touch the same box in no order: `race`
};

struct SignalFault {
  enum class Why : uint32_t {
    kCount,      // the event has `have` signals, its threshold is `need`
    kUncounted,  // `task` signals word `event` of `rank`'s heap, which no event counts
    kShared,     // the word of `event` is that of another event of the rank too
    kTooMuch,    // `task` waits until the event has `need`, its threshold is `have`
    kOwnCredit,  // `task` waits for the credit of its own launch
  };
  Why why = Why::kCount;
  uint32_t rank = 0, event = 0, task_rank = 0, task = kNone;
  uint64_t have = 0, need = 0;
};

// A queue that stands: the task at its head lacks `need - have` signals of `event`, one of which is due from
// `signaller` on the queue of the next step; or `event` is kNone and its launch waits for the launch of `signaller`.
struct Standing {
  uint32_t rank, queue, task, event, have, need, signaller_rank, signaller;
};

struct RaceFault {
  struct Access {
    uint32_t rank, task, tensor;  // task kNone: the host, at the end of the launch
    bool written;
  };
  Access first, second;
  bool next_launch = false;                       // the first in launch n, the second in launch n + 1
  uint32_t memory_rank = 0;                       // whose memory
  uint32_t row = 0, rows = 0, col = 0, cols = 0;  // where they meet, in the second's tensor
};

struct Verdict {
  Unsafe unsafe = Unsafe::kNothing;
  std::string text;
  SignalFault signal;
  std::vector<Standing> circle;  // each waits for the next, the last for the first
  RaceFault race;
  bool world = false;  // all ranks were there; otherwise what comes from other ranks was taken to arrive
  // queues that have tasks; tasks; events; edges (queue order, waits, signals, launches); boxes; pairs of accesses
  // whose order was looked at; most bytes held at once
  uint64_t queues = 0, tasks = 0, events = 0, edges = 0, boxes = 0, pairs = 0, bytes = 0;
};

// Proves one plan, or the plans of all ranks of a world (in order). The records are borrowed.
Verdict prove_plans(std::span<const PlanView> plans);

}  // namespace hyper_mpmd
