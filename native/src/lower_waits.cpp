// Lowering, what orders the tasks: waits derived from the boxes that earlier tiles touched, events, and their signals.
#include <algorithm>
#include <functional>
#include <tuple>

#include "lowering.h"
#include "wide.h"

namespace hyper_mpmd::planner {

// What a task that touches these boxes must wait for: one local event at most, the puts that land there, and if it
// writes, the peers that pull from there.
void Lowering::wait(const Touch& touch, const AccessRecord* accesses, std::vector<WaitRecord>& found) {
  History& history = histories_[touch.storage];
  std::vector<Box>& reach = scratch_boxes_;  // what it waits for, box by box
  reach.clear();
  for (size_t i = 0; i < touch.boxes.size(); ++i) {
    const AccessRecord& box = accesses[touch.boxes[i]];
    reach.push_back({box.row, box.rows, box.col, box.cols});
    if (touch.spaces[i] < 0) continue;
    const auto [row, rows] = layout_.whole_groups(touch.spaces[i], rank_, box.row, box.rows);
    reach.back().row = static_cast<uint32_t>(row);
    reach.back().rows = static_cast<uint32_t>(rows);
  }
  scratch_tasks_.clear();
  scratch_hits_.clear();
  bool crowded = false;
  auto gather = [&](BoxIndex& index, uint32_t mark) {
    for (const Box& box : reach) {
      index.overlapping(box, [&](uint32_t entry) {
        scratch_hits_.push_back(entry << 1 | mark);
        crowded |= index.tasks(entry).size() > 1;
      });
    }
  };
  gather(history.writers, 0);
  if (touch.written) gather(history.readers, 1);
  if (!scratch_hits_.empty()) {
    uint32_t event = kNone;
    std::pair<uint32_t, bool> hit{0, true};
    if (crowded) hit = hits_.insert(history.serial, scratch_hits_);
    if (crowded && !hit.second) {
      event = event_of_hits_[hit.first];
    } else {
      for (uint32_t entry : scratch_hits_) {
        auto tasks = (entry & 1 ? history.readers : history.writers).tasks(entry >> 1);
        scratch_tasks_.insert(scratch_tasks_.end(), tasks.begin(), tasks.end());
      }
      if (std::ranges::adjacent_find(scratch_tasks_, std::greater_equal{}) != scratch_tasks_.end()) {
        std::ranges::sort(scratch_tasks_);
        scratch_tasks_.erase(std::unique(scratch_tasks_.begin(), scratch_tasks_.end()), scratch_tasks_.end());
      }
      if (scratch_tasks_.size() > kMaxThreshold) {
        throw PlanLimit(std::to_string(scratch_tasks_.size()) + " tasks would signal one event; the limit is " +
                        std::to_string(kMaxThreshold));
      }
      bool fresh;
      std::tie(event, fresh) = producers_.insert(history.serial, scratch_tasks_);
      if (fresh) {
        const Box box = reach[0];
        out_.events.push_back({static_cast<uint32_t>(scratch_tasks_.size()), static_cast<uint32_t>(rank_), kNone,
                               out_.tasks[scratch_tasks_[0]].op, 0, touch.storage, box.row, box.rows, box.col,
                               box.cols});
      }
      if (crowded) event_of_hits_.push_back(event);
    }
    EventRecord& record = out_.events[event];
    for (const Box& box : reach) {
      const uint32_t row = std::min(record.row, box.row), col = std::min(record.col, box.col);
      record.rows = std::max(record.row + record.rows, box.row + box.rows) - row;
      record.cols = std::max(record.col + record.cols, box.col + box.cols) - col;
      record.row = row;
      record.col = col;
    }
    found.push_back({event, kLocalMark});
  }
  const size_t first_ghost = found.size();
  auto gather_ghosts = [&](BoxIndex& index) {
    for (const Box& box : reach) {
      index.overlapping(box, [&](uint32_t entry) {
        for (uint32_t ghost : index.tasks(entry)) found.push_back({ghost, kGhostMark});
      });
    }
  };
  gather_ghosts(history.ghosts);
  if (touch.written) gather_ghosts(history.takers);
  auto by_number = [](const WaitRecord& a, const WaitRecord& b) { return a.event < b.event; };
  std::sort(found.begin() + static_cast<ptrdiff_t>(first_ghost), found.end(), by_number);
  found.erase(std::unique(found.begin() + static_cast<ptrdiff_t>(first_ghost), found.end(),
                          [](const WaitRecord& a, const WaitRecord& b) { return a.event == b.event; }),
              found.end());
}

// Enter what the op's tasks touched in the histories, as far as a later op will ask.
void Lowering::enter(size_t index, size_t first) {
  const OpRow& op = d_.ops[index];
  auto boxes = d_.boxes(op);
  std::vector<int64_t> written;
  for (const OperandRow& box : boxes) {
    const int64_t storage = d_.tensors[box.tensor].storage;
    if (!box.write || std::ranges::find(written, storage) != written.end()) continue;
    written.push_back(storage);
    histories_[storage] = History{++serials_, {}, {}, {}, {}};
    if (last_use_[storage] > index) histories_[storage].writers.reserve(out_.tasks.size() - first);
  }
  if (d_.is_routed(op)) {
    History& history = histories_[d_.tensors[boxes[op.pull ? 0 : 1].tensor].storage];
    BoxIndex& ghosts = op.pull ? history.takers : history.ghosts;
    for (size_t g = 0; g < ghosts_.size(); ++g) {
      if (ghosts_[g].op == index) {
        ghosts.add({ghosts_[g].row, ghosts_[g].rows, 0, ghosts_[g].cols}, static_cast<uint32_t>(g));
      }
    }
  }
  for (size_t b = 0; b < boxes.size(); ++b) {
    const int64_t storage = d_.tensors[boxes[b].tensor].storage;
    if ((boxes[b].write ? last_use_ : last_write_)[storage] <= index) continue;
    BoxIndex& store = boxes[b].write ? histories_[storage].writers : histories_[storage].readers;
    for (size_t task = first; task < out_.tasks.size(); ++task) {
      const AccessRecord& access = out_.accesses[out_.tasks[task].access_begin + b];
      if (access.rank != static_cast<uint32_t>(rank_)) continue;
      store.add({access.row, access.rows, access.col, access.cols}, static_cast<uint32_t>(task));
    }
  }
}

// Number the events of other ranks (by slot) after the local ones, credits last, and let waits name them.
void Lowering::close_events() {
  const auto local = static_cast<uint32_t>(out_.events.size());
  out_.local_events = local;
  const u128 all = static_cast<u128>(local) + ghosts_.size() + (landings_.empty() ? 0 : static_cast<u128>(d_.ranks));
  for (auto [what, count] : {std::pair<const char*, u128>{"waits", out_.waits.size()}, {"events", all}}) {
    if (count > kMaxIndex) {
      throw PlanLimit("rank " + std::to_string(rank_) + " has " + decimal(count) + " " + what + "; the limit is " +
                      std::to_string(kMaxIndex));
    }
  }
  for (const Ghost& g : ghosts_) {
    out_.events.push_back({g.threshold, g.source, g.slot, g.op, g.order, g.tensor, g.row, g.rows, 0, g.cols});
  }
  const auto credits = static_cast<uint32_t>(out_.events.size());
  const auto me = static_cast<uint32_t>(rank_);
  if (!landings_.empty() && d_.ranks > 1) {
    for (uint32_t peer = 0; peer < d_.ranks; ++peer) {
      if (peer == me) continue;
      const auto slot = static_cast<uint32_t>(landings_.credit_slot(peer, rank_));
      out_.events.push_back({1, peer, slot, kNone, 0, kNone, 0, 0, 0, 0});
    }
  }
  for (WaitRecord& wait : out_.waits) {
    if (wait.threshold == kGhostMark) {
      wait = {local + wait.event, ghosts_[wait.event].threshold};
    } else if (wait.threshold == kCreditMark) {
      // A credit is due from the launch before: nothing is added to this launch's base.
      wait = {credits + wait.event - (wait.event > me), 0};
    } else {
      wait.threshold = out_.events[wait.event].threshold;
    }
  }
}

// Each task's signals: its local events in order, then those to peers.
void Lowering::signals() {
  const size_t total = producers_.item_count() + peer_signals_.size();
  if (total > kMaxIndex) {
    throw PlanLimit("rank " + std::to_string(rank_) + " has " + std::to_string(total) + " signals; the limit is " +
                    std::to_string(kMaxIndex));
  }
  for (size_t event = 0; event < producers_.size(); ++event) {
    for (uint32_t task : producers_[event]) ++out_.tasks[task].signal_count;
  }
  for (const auto& [task, signal] : peer_signals_) ++out_.tasks[task].signal_count;
  uint32_t begin = 0;
  for (TaskRecord& task : out_.tasks) {
    task.signal_begin = begin;
    begin += task.signal_count;
    task.signal_count = 0;
  }
  out_.signals.resize(total);
  const auto me = static_cast<uint32_t>(rank_);
  for (size_t event = 0; event < producers_.size(); ++event) {
    for (uint32_t number : producers_[event]) {
      TaskRecord& task = out_.tasks[number];
      out_.signals[task.signal_begin + task.signal_count++] = {me, static_cast<uint32_t>(event)};
    }
  }
  for (const auto& [number, signal] : peer_signals_) {
    TaskRecord& task = out_.tasks[number];
    out_.signals[task.signal_begin + task.signal_count++] = signal;
  }
}

void Lowering::peers() {
  for (int64_t peer = 0; peer < d_.ranks; ++peer) {
    if (landings_.empty() || d_.ranks == 1) {
      out_.peers.push_back({0, 0});
    } else {
      out_.peers.push_back({static_cast<uint32_t>(landings_.credit_slot(rank_, peer)),
                            static_cast<uint32_t>(landings_.stride(peer) * d_.ranks)});
    }
  }
}

}  // namespace hyper_mpmd::planner
