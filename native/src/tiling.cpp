// What a tile costs, and which tile sizes an op gets.
#include <algorithm>
#include <map>

#include "hyper_mpmd/dtype.h"
#include "hyper_mpmd/planner.h"
#include "wide.h"

namespace hyper_mpmd::planner {

namespace {

std::pair<int64_t, int64_t> interval(const Layout& layout, const OpRow& op, int64_t kind, int64_t value, int64_t rank,
                                     int64_t group) {
  if (kind != kSpace) return {0, value};  // an absent axis has extent 1
  if (!op.by_group) return {0, layout.total(value, rank)};
  return {layout.offset(value, rank, group), layout.size(value, rank, group)};
}

// How many groups of a rank have which shape: index into the distinct shapes, times.
struct Work {
  struct Shape {
    int64_t rows, reduction;
    auto operator<=>(const Shape&) const = default;
  };
  std::vector<Shape> shapes;                                   // over all ranks
  std::vector<std::vector<std::pair<size_t, int64_t>>> ranks;  // distinct ones only
};

// The groups to be cut; for a communication op, those that a rank receives.
Work collect(const Descriptor& descriptor, const Layout& layout, const OpRow& op) {
  std::vector<std::vector<Work::Shape>> per_rank;
  int64_t space = op.route ? descriptor.received_space(op) : op.space;
  bool same = space < 0 || layout.is_uniform(space);
  for (int64_t rank = 0; rank < (same ? 1 : descriptor.ranks); ++rank) {
    auto& mine = per_rank.emplace_back();
    if (op.route) {
      for (int64_t group = 0; group < layout.groups(space); ++group) {
        if (int64_t rows = layout.size(space, rank, group)) mine.push_back({rows, 1});
      }
    } else {
      for (const Slab& slab : slabs(layout, op, rank)) mine.push_back({slab.rows, slab.reduction});
    }
    std::sort(mine.begin(), mine.end());
  }
  std::sort(per_rank.begin(), per_rank.end());
  per_rank.erase(std::unique(per_rank.begin(), per_rank.end()), per_rank.end());

  Work work;
  for (const auto& mine : per_rank) work.shapes.insert(work.shapes.end(), mine.begin(), mine.end());
  std::sort(work.shapes.begin(), work.shapes.end());
  work.shapes.erase(std::unique(work.shapes.begin(), work.shapes.end()), work.shapes.end());
  for (const auto& mine : per_rank) {
    auto& counts = work.ranks.emplace_back();
    for (const Work::Shape& shape : mine) {
      size_t index =
          static_cast<size_t>(std::lower_bound(work.shapes.begin(), work.shapes.end(), shape) - work.shapes.begin());
      if (counts.empty() || counts.back().first != index) counts.emplace_back(index, 0);
      ++counts.back().second;
    }
  }
  return work;
}

// Sizes of the full tiles and of the rest, and how many of each.
struct Cuts {
  std::pair<int64_t, int64_t> parts[2];
  int count = 0;
  Cuts(int64_t extent, int64_t size) {
    if (size && extent / size) parts[count++] = {size, extent / size};
    if (size && extent % size) parts[count++] = {extent % size, 1};
  }
  const std::pair<int64_t, int64_t>* begin() const { return parts; }
  const std::pair<int64_t, int64_t>* end() const { return parts + count; }
};

struct Sum {
  u128 total;
  int64_t largest;
};

// Where other work fills the cores while an op's last tiles run, so large a part of the largest tile counts: 1 / 8.
constexpr int64_t kHiddenTail = 8;

// Sum of tile costs / cores + largest tile (or the part of it that counts), on the rank where that is most.
int64_t worst_makespan(const Work& work, const std::vector<Sum>& sums, int64_t cores, int64_t tail,
                       const std::string& name) {
  int64_t worst = 0;
  for (const auto& counts : work.ranks) {
    u128 total = 0;
    int64_t largest = 0;
    for (auto [shape, times] : counts) {
      total += sums[shape].total * static_cast<u128>(times);
      largest = std::max(largest, sums[shape].largest);
    }
    if (total > kMaxTime) {
      throw PlanLimit("task '" + name + "': its tiles take more than " + std::to_string(kMaxTime) + " ns together");
    }
    worst = std::max(worst, static_cast<int64_t>(total) / cores + largest / tail);
  }
  return worst;
}

// Whether a task of this graph reads what the op writes.
bool is_read(const Descriptor& descriptor, const OpRow& op) {
  for (const OperandRow& box : descriptor.boxes(op)) {
    for (const OpRow& reader : descriptor.ops) {
      for (const OperandRow& theirs : descriptor.boxes(reader)) {
        if (box.write && !theirs.write && theirs.tensor == box.tensor) return true;
      }
    }
  }
  return false;
}

// Whether the op reads what a communication op puts here.
bool reads_arrivals(const Descriptor& descriptor, const OpRow& op) {
  for (const OpRow& route : descriptor.ops) {
    if (route.route == kNoRoute) continue;
    for (const OperandRow& box : descriptor.boxes(op)) {
      if (!box.write && box.tensor == descriptor.boxes(route)[1].tensor) return true;
    }
  }
  return false;
}

// Whether other work fills the cores while the last tiles of the op run: that of ops that nothing waits for, which are
// left to the end. Nothing is to be gained where the op itself waits for rows that come in late.
bool hidden_tail(const Descriptor& descriptor, const OpRow& op) {
  if (op.route != kNoRoute) return false;
  if (!is_read(descriptor, op)) return true;
  if (reads_arrivals(descriptor, op)) return false;
  return std::ranges::any_of(descriptor.ops, [&](const OpRow& other) {
    return other.kind == op.kind && other.route == kNoRoute && !is_read(descriptor, other);
  });
}

TileSize choose(const Descriptor& descriptor, const Layout& layout, const Device& device, size_t index) {
  const OpRow& op = descriptor.ops[index];
  const Work work = collect(descriptor, layout, op);
  const CostModel cost(descriptor, device, index);
  const int64_t cores = op.kind == static_cast<int64_t>(CoreKind::kAic) ? device.aic : device.aiv;
  int64_t most_rows = work.shapes.empty() ? 1 : work.shapes.back().rows;
  const std::vector<int64_t> row_tiles = op.cut_rows ? device.row_tiles : std::vector{most_rows};
  const std::vector<int64_t> col_tiles = op.cut_cols ? device.col_tiles : std::vector{op.cols_value};

  const int64_t tail = hidden_tail(descriptor, op) ? kHiddenTail : 1;
  TileSize best{};
  int64_t least = -1;
  std::vector<int64_t> heights(work.shapes.size()), before;
  std::vector<Sum> sums(work.shapes.size());
  for (int64_t tile_rows : row_tiles) {
    for (size_t i = 0; i < heights.size(); ++i) heights[i] = even_cut(work.shapes[i].rows, tile_rows, kRowUnit);
    if (heights == before && least >= 0) continue;  // the same tiles as under the size before
    before = heights;
    int64_t width_before = -1;
    for (int64_t tile_cols : col_tiles) {
      int64_t width = even_cut(op.cols_value, tile_cols, kColUnit);
      if (width == width_before) continue;
      width_before = width;
      const Cuts across(op.cols_value, width);
      for (size_t i = 0; i < heights.size(); ++i) {
        sums[i] = {0, 0};
        for (auto [high, down] : Cuts(work.shapes[i].rows, heights[i])) {
          for (auto [wide, times] : across) {
            int64_t one = cost.streamed_tile(high, wide, work.shapes[i].reduction);
            sums[i].total += static_cast<u128>(one) * static_cast<u128>(down) * static_cast<u128>(times);
            sums[i].largest = std::max(sums[i].largest, one);
          }
        }
      }
      int64_t worst = worst_makespan(work, sums, cores, tail, descriptor.op_names[index]);
      if (least < 0 || worst < least) {
        least = worst;
        best = {tile_rows, tile_cols};
      }
    }
  }
  return best;
}

}  // namespace

std::vector<Slab> slabs(const Layout& layout, const OpRow& op, int64_t rank) {
  std::vector<Slab> found;
  for (int64_t group = 0; group < (op.by_group ? op.groups : 1); ++group) {
    auto [begin, rows] = interval(layout, op, op.rows_kind, op.rows_value, rank, group);
    auto [reduction_begin, reduction] = interval(layout, op, op.reduction_kind, op.reduction_value, rank, group);
    if (rows) found.push_back({group, begin, rows, reduction_begin, reduction});
  }
  return found;
}

CostModel::CostModel(const Descriptor& descriptor, const Device& device, size_t index)
    : name_(descriptor.op_names[index]) {
  const OpRow& op = descriptor.ops[index];
  for (const OperandRow& box : descriptor.boxes(op)) {
    const TensorRow& tensor = descriptor.tensors[box.tensor];
    bool chosen = box.rows_axis == kAll && !box.group;
    factors_.push_back({box.rows_axis, box.cols_axis, tensor.block_rows, tensor.cols, tensor.item_bytes, chosen});
  }
  const bool cube = op.kind == static_cast<int64_t>(CoreKind::kAic);
  const bool half = is_half(static_cast<DType>(op.dtype));
  flops_per_point_ = static_cast<uint64_t>(op.flops_per_point);
  ramp_rows_ = static_cast<uint64_t>((cube ? device.cube_ramp : device.vector_ramp)[0]);
  ramp_cols_ = static_cast<uint64_t>((cube ? device.cube_ramp : device.vector_ramp)[1]);
  flops_per_us_ = static_cast<uint64_t>((cube ? device.cube_flops : device.vector_flops)[half]);
  route_ = op.route != kNoRoute;
  bytes_per_us_ = static_cast<uint64_t>(route_ ? device.link_bytes : cube ? device.cube_bytes : device.vector_bytes);
  cores_ = static_cast<uint64_t>(cube ? device.aic : device.aiv);
  l2_bytes_ = static_cast<uint64_t>(device.l2_bytes);
  memory_bytes_per_us_ = static_cast<uint64_t>(device.memory_bytes);
  task_ns_ = device.task_ns;
  row_bytes_ = device.row_bytes;
}

uint64_t CostModel::moved_bytes(int64_t rows, int64_t cols, int64_t reduction) const {
  u128 bytes = 0;
  for (const Factor& f : factors_) {
    u128 chosen = static_cast<u128>(rows) * static_cast<u128>(reduction);
    const int64_t high[4] = {f.all_rows, rows, cols, reduction}, wide[4] = {f.all_cols, rows, cols, reduction};
    bytes += (f.chosen ? chosen : static_cast<u128>(high[f.rows_axis])) *
             static_cast<u128>(wide[f.cols_axis] * f.item_bytes + (wide[f.cols_axis] < f.all_cols ? row_bytes_ : 0));
  }
  return static_cast<uint64_t>(std::min<u128>(bytes, kMaxWork + 1));
}

int64_t CostModel::streamed_tile(int64_t rows, int64_t cols, int64_t reduction) const {
  const int64_t alone = tile(rows, cols, reduction);
  const uint64_t bytes = moved_bytes(rows, cols, reduction);
  if (route_ || bytes <= l2_bytes_) return alone;
  const u128 shared = static_cast<u128>(bytes - l2_bytes_) * cores_ * 1000 / memory_bytes_per_us_;
  return std::max(alone, static_cast<int64_t>(std::min<u128>(shared, kMaxTime)));
}

int64_t CostModel::tile(int64_t rows, int64_t cols, int64_t reduction) const {
  // No extent exceeds kMaxIndex < 2^32, no ramp 2^16 and no flops_per_point 2^31: 128 bits hold every product below.
  const uint64_t moved = moved_bytes(rows, cols, reduction);
  u128 flops = static_cast<u128>(flops_per_point_) * (static_cast<uint64_t>(rows) + ramp_rows_) *
               (static_cast<uint64_t>(cols) + ramp_cols_) * static_cast<uint64_t>(reduction);
  if (flops > kMaxWork || moved > kMaxWork) {
    throw PlanLimit("task '" + name_ + "': a tile of " + std::to_string(rows) + " x " + std::to_string(cols) +
                    " over " + std::to_string(reduction) +
                    (flops > kMaxWork ? " does more than " : " moves more than ") + std::to_string(kMaxWork) +
                    (flops > kMaxWork ? " operations" : " bytes"));
  }
  const auto work = static_cast<uint64_t>(flops);
  if (route_) return task_ns_ + static_cast<int64_t>(moved / 2 * 1000 / bytes_per_us_);
  return task_ns_ + static_cast<int64_t>(std::max(work * 1000 / flops_per_us_, moved * 1000 / bytes_per_us_));
}

std::vector<TileSize> choose_tiles(const Descriptor& descriptor, const Layout& layout, const Device& device,
                                   std::span<const GivenTile> given) {
  std::vector<TileSize> tiles(descriptor.ops.size());
  for (size_t index = 0; index < tiles.size(); ++index) {
    auto mine = std::find_if(given.begin(), given.end(),
                             [&](const GivenTile& g) { return g.op == static_cast<int64_t>(index); });
    tiles[index] = mine != given.end() ? TileSize{mine->rows, mine->cols} : choose(descriptor, layout, device, index);
  }
  return tiles;
}

}  // namespace hyper_mpmd::planner
