// Lowering, the tasks: every op cut into tiles, and which of them other ranks are told of.
#include <algorithm>

#include "lowering.h"
#include "wide.h"

namespace hyper_mpmd::planner {

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
                        static_cast<uint32_t>(op.hop), static_cast<uint32_t>(op.route),
                        static_cast<uint32_t>(op.limit_bits)});
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
    if (touch == found.end()) touch = found.insert(found.end(), Touch{storage, false, {}, {}, false, false, false, {}});
    touch->written |= boxes[b].write != 0;
    touch->boxes.push_back(b);
    const bool widened = policy_.whole_groups && boxes[b].rows_axis == kRows && !boxes[b].group;
    touch->spaces.push_back(widened ? d_.tensors[boxes[b].tensor].space : -1);
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

Program lower(const Descriptor& descriptor, const Layout& layout, const Landings& landings, const Device& device,
              std::span<const TileSize> tiles, const Policy& policy, int64_t rank) {
  return Lowering(descriptor, layout, landings, device, tiles, policy, rank).run();
}

}  // namespace hyper_mpmd::planner
