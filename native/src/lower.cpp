// Lowering: every op cut into tile tasks; what each tile waits for, derived from the boxes that earlier tiles touched.
#include <algorithm>
#include <functional>
#include <tuple>

#include "hyper_mpmd/overlap.h"
#include "hyper_mpmd/planner.h"
#include "wide.h"

namespace hyper_mpmd::planner {

namespace {

// While lowering, a wait for an event of another rank, or for a credit, carries its own number in `event` and one of
// these.
constexpr uint32_t kGhostMark = 0xffffffffu, kCreditMark = 0xfffffffeu, kLocalMark = 0;

// Who touched a storage since it was last written as a whole.
struct History {
  uint32_t serial = 0;  // events are shared between tasks that wait for the same tasks, within one history
  BoxIndex writers, readers;
  BoxIndex ghosts;  // rows that other ranks put there; its "tasks" are indices into all ghosts
  BoxIndex takers;  // rows that other ranks pull from there, likewise
};

// One storage that the tasks of an op touch: which of the op's boxes, and which cuts move them.
struct Touch {
  uint32_t storage;
  bool written;
  std::vector<size_t> boxes;
  bool by_slab = false, by_row = false, by_col = false;
  // Waits found for one row of tiles, or for each column where boxes do not move with the rows.
  struct Found {
    std::vector<WaitRecord> waits;
    int64_t slab = -2;  // the slab they hold for
  };
  std::vector<Found> found;
};

class Lowering {
 public:
  Lowering(const Descriptor& descriptor, const Layout& layout, const Landings& landings, const Device& device,
           std::span<const TileSize> tiles, int64_t rank)
      : d_(descriptor), layout_(layout), landings_(landings), device_(device), tiles_(tiles), rank_(rank) {
    out_.rank = rank;
    out_.ranks = d_.ranks;
  }

  Program run();

 private:
  void find_uses();
  void count_tasks();
  void collect_ghosts();
  void grid(size_t index);
  void travels(size_t index);
  void tell_readers(size_t index);
  std::vector<Touch> touches(const OpRow& op) const;
  TaskRecord& add_task(size_t op, int64_t group, int64_t peer, int64_t cost);
  void add_access(const OperandRow& box, int64_t rank, const Box& where);
  void wait(const Touch& touch, const AccessRecord* accesses, std::vector<WaitRecord>& found);
  void enter(size_t index, size_t first);
  void close_events();
  void signals();
  void peers();

  const Descriptor& d_;
  const Layout& layout_;
  const Landings& landings_;
  const Device& device_;
  std::span<const TileSize> tiles_;
  int64_t rank_;
  Program out_;

  std::vector<History> histories_;
  std::vector<size_t> last_use_, last_write_;  // by storage: the last op that touches, or writes, it; 0 counts as none
  uint32_t serials_ = 0;
  ListTable producers_;  // of each local event
  ListTable hits_;       // combinations of indexed boxes already looked up, where boxes stand for many readers
  std::vector<uint32_t> event_of_hits_;
  std::vector<Ghost> ghosts_;  // in order of their slots
  std::vector<std::pair<uint32_t, SignalRecord>> peer_signals_;
  std::vector<uint32_t> scratch_tasks_, scratch_hits_;
};

Program Lowering::run() {
  histories_.resize(d_.tensors.size());
  find_uses();
  out_.tensors = place_tensors(d_, layout_, rank_);
  count_tasks();
  collect_ghosts();
  for (size_t index = 0; index < d_.ops.size(); ++index) {
    const size_t first = out_.tasks.size();
    if (d_.ops[index].route != kNoRoute) {
      travels(index);
    } else {
      grid(index);
    }
    enter(index, first);
  }
  close_events();
  signals();
  for (const OpRow& op : d_.ops) {
    out_.ops.push_back({static_cast<uint32_t>(op.kernel), static_cast<uint32_t>(op.kind),
                        static_cast<uint32_t>(op.dtype), static_cast<uint32_t>(op.read_boxes),
                        static_cast<uint32_t>(op.hop), static_cast<uint32_t>(op.route)});
  }
  peers();
  return std::move(out_);
}

// Which storages must be remembered, and for how long.
void Lowering::find_uses() {
  last_use_.assign(d_.tensors.size(), 0);
  last_write_.assign(d_.tensors.size(), 0);
  for (size_t index = 0; index < d_.ops.size(); ++index) {
    for (const OperandRow& box : d_.boxes(d_.ops[index])) {
      const int64_t storage = d_.tensors[box.tensor].storage;
      last_use_[storage] = index;
      if (box.write) last_write_[storage] = index;
    }
  }
}

// Refuse what no index can number, before it is made.
void Lowering::count_tasks() {
  u128 total = 0;
  size_t boxes = 0;
  for (size_t index = 0; index < d_.ops.size(); ++index) {
    const OpRow& op = d_.ops[index];
    u128 count = 0;
    if (op.route != kNoRoute) {
      count = static_cast<u128>(landings_.count(index, rank_));
    } else {
      const int64_t width = even_cut(op.cols_value, tiles_[index].cols, kColUnit);
      for (const Slab& slab : slabs(layout_, op, rank_)) {
        const int64_t height = even_cut(slab.rows, tiles_[index].rows, kRowUnit);
        count += static_cast<u128>((slab.rows + height - 1) / height) *
                 static_cast<u128>((op.cols_value + width - 1) / width);
      }
    }
    total += count;
    if (total > kMaxIndex) {
      throw PlanLimit("task '" + d_.op_names[index] + "' has " + decimal(count) + " tiles on rank " +
                      std::to_string(rank_) + ", which makes " + decimal(total) + "; the limit is " +
                      std::to_string(kMaxIndex) + "; take larger tiles");
    }
    boxes += static_cast<size_t>(count) * static_cast<size_t>(op.boxes);
  }
  if (boxes > kMaxIndex) {
    throw PlanLimit("rank " + std::to_string(rank_) + " has " + std::to_string(boxes) + " boxes; the limit is " +
                    std::to_string(kMaxIndex));
  }
  out_.tasks.reserve(static_cast<size_t>(total));
  out_.costs.reserve(static_cast<size_t>(total));
  out_.waits.reserve(static_cast<size_t>(total));
  out_.accesses.reserve(boxes);
}

void Lowering::collect_ghosts() {
  for (size_t index = 0; index < d_.ops.size(); ++index) {
    if (!d_.is_routed(d_.ops[index])) continue;
    auto found = landings_.ghosts(index, rank_);
    ghosts_.insert(ghosts_.end(), found.begin(), found.end());
  }
  std::sort(ghosts_.begin(), ghosts_.end(), [](const Ghost& a, const Ghost& b) { return a.slot < b.slot; });
}

TaskRecord& Lowering::add_task(size_t op, int64_t group, int64_t peer, int64_t cost) {
  TaskRecord task{};
  task.op = static_cast<uint32_t>(op);
  task.group = static_cast<uint32_t>(group);
  task.peer = static_cast<uint32_t>(peer);
  task.access_begin = static_cast<uint32_t>(out_.accesses.size());
  task.wait_begin = static_cast<uint32_t>(out_.waits.size());
  task.cost_ns = static_cast<uint32_t>(std::min<int64_t>(cost, kNone));
  out_.costs.push_back(cost);
  return out_.tasks.emplace_back(task);
}

void Lowering::add_access(const OperandRow& box, int64_t rank, const Box& where) {
  out_.accesses.push_back(
      {static_cast<uint32_t>(box.tensor), static_cast<uint32_t>(rank), where.row, where.rows, where.col, where.cols});
}

// The storages that a task of the op touches, in order of first touch. A task that overwrites what it reads reads no
// more than it writes, so that its boxes may be taken together.
std::vector<Touch> Lowering::touches(const OpRow& op) const {
  std::vector<Touch> found;
  auto boxes = d_.boxes(op);
  for (size_t b = 0; b < boxes.size(); ++b) {
    const auto storage = static_cast<uint32_t>(d_.tensors[boxes[b].tensor].storage);
    auto touch = std::find_if(found.begin(), found.end(), [&](const Touch& t) { return t.storage == storage; });
    if (touch == found.end()) touch = found.insert(found.end(), Touch{storage, false, {}, false, false, false, {}});
    touch->written |= boxes[b].write != 0;
    touch->boxes.push_back(b);
    for (int64_t axis : {boxes[b].rows_axis, boxes[b].cols_axis}) {
      touch->by_row |= axis == kRows;
      touch->by_col |= axis == kCols;
      touch->by_slab |= axis == kRows || axis == kReduction;
    }
    touch->by_slab |= boxes[b].group != 0;
  }
  return found;
}

void Lowering::grid(size_t index) {
  const OpRow& op = d_.ops[index];
  const CostModel model(d_, device_, index);
  auto boxes = d_.boxes(op);
  std::vector<Touch> touched = touches(op);
  const int64_t width = even_cut(op.cols_value, tiles_[index].cols, kColUnit);
  const auto columns = static_cast<size_t>((op.cols_value + width - 1) / width);
  for (Touch& touch : touched) touch.found.resize(touch.by_col && !touch.by_row ? columns : 1);

  uint32_t number = 0;
  int64_t slab_number = -1;
  for (const Slab& slab : slabs(layout_, op, rank_)) {
    ++slab_number;
    const int64_t height = even_cut(slab.rows, tiles_[index].rows, kRowUnit);
    for (int64_t row = 0; row < slab.rows; row += height) {
      const int64_t rows = std::min(height, slab.rows - row);
      int64_t cost = 0, costed = -1;
      for (size_t column = 0; column < columns; ++column) {
        const int64_t col = static_cast<int64_t>(column) * width, cols = std::min(width, op.cols_value - col);
        if (cols != costed) cost = model.tile(rows, costed = cols, slab.reduction);
        TaskRecord& task = add_task(index, slab.group, rank_, cost);
        task.number = number++;
        task.access_count = static_cast<uint32_t>(boxes.size());
        const int64_t begin[4] = {0, slab.begin + row, col, slab.reduction_begin};
        const int64_t length[4] = {0, rows, cols, slab.reduction};
        const int64_t extent[4] = {0, op.rows_value, op.cols_value, op.reduction_value};
        for (const OperandRow& box : boxes) {
          const TensorRow& tensor = d_.tensors[box.tensor];
          const int64_t all = box.group ? tensor.block_rows : layout_.tensor_rows(tensor, rank_);
          add_access(box, rank_,
                     {static_cast<uint32_t>(begin[box.rows_axis] + (box.group ? slab.group * tensor.block_rows : 0)),
                      static_cast<uint32_t>(box.rows_axis == kAll ? all : length[box.rows_axis]),
                      static_cast<uint32_t>(begin[box.cols_axis] + box.shift * extent[box.cols_axis]),
                      static_cast<uint32_t>(box.cols_axis == kAll ? tensor.cols : length[box.cols_axis])});
        }
        const AccessRecord* accesses = &out_.accesses[task.access_begin];
        for (Touch& touch : touched) {
          Touch::Found& found = touch.found[touch.found.size() > 1 ? column : 0];
          const bool valid =
              !touch.by_row ? found.slab == (touch.by_slab ? slab_number : -1) : !touch.by_col && column > 0;
          if (!valid) {
            found.waits.clear();
            wait(touch, accesses, found.waits);
            found.slab = touch.by_slab ? slab_number : -1;
          }
          out_.waits.insert(out_.waits.end(), found.waits.begin(), found.waits.end());
        }
        task.wait_count = static_cast<uint32_t>(out_.waits.size() - task.wait_begin);
      }
    }
  }
}

// The tasks of a communication op. A put runs where the rows lie and a pull where they go, so one of the two boxes may
// be a peer's: its own plan sees to the rest of what touches that memory.
void Lowering::travels(size_t index) {
  const OpRow& op = d_.ops[index];
  const CostModel model(d_, device_, index);
  auto boxes = d_.boxes(op);
  std::vector<Touch> touched = touches(op);
  uint32_t number = 0;
  std::vector<WaitRecord> found;
  for (const PutTile& tile : landings_.tiles(index, rank_)) {
    TaskRecord& task = add_task(index, tile.group, tile.peer, model.tile(tile.rows, 1, 1));
    task.number = number++;
    task.access_count = 2;
    const auto rows = static_cast<uint32_t>(tile.rows);
    const auto cols = static_cast<uint32_t>(d_.tensors[boxes[0].tensor].cols);
    add_access(boxes[0], op.pull ? tile.peer : rank_, {static_cast<uint32_t>(tile.source_row), rows, 0, cols});
    add_access(boxes[1], op.pull ? rank_ : tile.peer, {static_cast<uint32_t>(tile.target_row), rows, 0, cols});
    const bool remote = tile.peer != rank_;
    for (const Touch& touch : touched) {
      if (remote && touch.written != (op.pull != 0)) continue;
      found.clear();
      wait(touch, &out_.accesses[task.access_begin], found);
      out_.waits.insert(out_.waits.end(), found.begin(), found.end());
    }
    if (remote) {
      const auto peer = static_cast<uint32_t>(tile.peer);
      uint32_t slot = tile.slot;
      if (op.pull) {
        const auto ready = std::ranges::lower_bound(ghosts_, tile.slot, {}, &Ghost::slot);
        out_.waits.push_back({static_cast<uint32_t>(ready - ghosts_.begin()), kGhostMark});
        slot = static_cast<uint32_t>(landings_.taken_slot(index, rank_, tile.peer));
      } else {
        out_.waits.push_back({peer, kCreditMark});
      }
      peer_signals_.emplace_back(static_cast<uint32_t>(out_.tasks.size() - 1), SignalRecord{peer, slot});
    }
    task.wait_count = static_cast<uint32_t>(out_.waits.size() - task.wait_begin);
  }
  if (op.pull) tell_readers(index);
}

// The tasks that made the rows which peers pull signal each row tile there. Their memory is free again before this
// launch has ended here: each reader signals what it has taken.
void Lowering::tell_readers(size_t index) {
  const TensorRow& sent = d_.tensors[d_.boxes(d_.ops[index])[0].tensor];
  BoxIndex& writers = histories_[sent.storage].writers;
  for (int64_t reader = 0; reader < d_.ranks; ++reader) {
    if (reader == rank_) continue;
    for (const PutTile& tile : landings_.travels(index, rank_, reader)) {
      scratch_tasks_.clear();
      const Box rows{static_cast<uint32_t>(tile.source_row), static_cast<uint32_t>(tile.rows), 0,
                     static_cast<uint32_t>(sent.cols)};
      writers.overlapping(rows, [&](uint32_t entry) {
        auto tasks = writers.tasks(entry);
        scratch_tasks_.insert(scratch_tasks_.end(), tasks.begin(), tasks.end());
      });
      std::ranges::sort(scratch_tasks_);
      scratch_tasks_.erase(std::unique(scratch_tasks_.begin(), scratch_tasks_.end()), scratch_tasks_.end());
      for (uint32_t task : scratch_tasks_) {
        peer_signals_.emplace_back(task, SignalRecord{static_cast<uint32_t>(reader), tile.slot});
      }
    }
  }
}

// What a task that touches these boxes must wait for: one local event at most, the puts that land there, and if it
// writes, the peers that pull from there.
void Lowering::wait(const Touch& touch, const AccessRecord* accesses, std::vector<WaitRecord>& found) {
  History& history = histories_[touch.storage];
  auto box_of = [&](size_t b) { return Box{accesses[b].row, accesses[b].rows, accesses[b].col, accesses[b].cols}; };
  scratch_tasks_.clear();
  scratch_hits_.clear();
  bool crowded = false;
  auto gather = [&](BoxIndex& index, uint32_t mark) {
    for (size_t b : touch.boxes) {
      index.overlapping(box_of(b), [&](uint32_t entry) {
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
        const Box box = box_of(touch.boxes[0]);
        out_.events.push_back({static_cast<uint32_t>(scratch_tasks_.size()), static_cast<uint32_t>(rank_), kNone,
                               out_.tasks[scratch_tasks_[0]].op, 0, touch.storage, box.row, box.rows, box.col,
                               box.cols});
      }
      if (crowded) event_of_hits_.push_back(event);
    }
    EventRecord& record = out_.events[event];
    for (size_t b : touch.boxes) {
      const Box box = box_of(b);
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
    for (size_t b : touch.boxes) {
      index.overlapping(box_of(b), [&](uint32_t entry) {
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

}  // namespace

Program lower(const Descriptor& descriptor, const Layout& layout, const Landings& landings, const Device& device,
              std::span<const TileSize> tiles, int64_t rank) {
  return Lowering(descriptor, layout, landings, device, tiles, rank).run();
}

}  // namespace hyper_mpmd::planner
