#include "prove_memory.h"

#include <algorithm>
#include <numeric>

namespace hyper_mpmd::prove {

namespace {
// Cells of one memory. Tiles that lie side by side make one each; boxes cut across one another make more.
constexpr uint64_t kMostCells = uint64_t{1} << 27;

void sort_unique(std::vector<uint64_t>& cuts) {
  std::sort(cuts.begin(), cuts.end());
  cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
}
}  // namespace

void Memory::announce(const Rect& rect) {
  ++writes_left_;
  if (!rect.empty()) writes_.push_back(rect);
}

bool Memory::build() {
  if (writes_.empty()) return true;
  std::sort(writes_.begin(), writes_.end(), [](const Rect& a, const Rect& b) {
    return std::tie(a.row, a.row_end, a.col, a.col_end) < std::tie(b.row, b.row_end, b.col, b.col_end);
  });
  writes_.erase(std::unique(writes_.begin(), writes_.end()), writes_.end());
  uint64_t last_row = ~uint64_t{0}, last_end = last_row;
  for (const Rect& rect : writes_) {
    if (rect.row == last_row && rect.row_end == last_end) continue;
    row_cuts_.push_back(last_row = rect.row);
    row_cuts_.push_back(last_end = rect.row_end);
  }
  sort_unique(row_cuts_);
  const size_t count = row_cuts_.size() - 1;
  const auto band_at = [&](uint64_t row) {
    return static_cast<size_t>(std::lower_bound(row_cuts_.begin(), row_cuts_.end(), row) - row_cuts_.begin());
  };
  // The columns at which each band is cut, gathered by counting.
  std::vector<uint64_t> begins(count + 1, 0);
  uint64_t pieces = 0;
  const auto each_band = [&](auto&& visit) {
    for (const Rect& rect : writes_) {
      for (size_t b = band_at(rect.row); b < count && row_cuts_[b] < rect.row_end; ++b) visit(b, rect);
    }
  };
  for (const Rect& rect : writes_) {
    pieces += 2 * (band_at(rect.row_end) - band_at(rect.row));
    if (pieces > kMostCells) return false;
  }
  each_band([&](size_t b, const Rect&) { begins[b + 1] += 2; });
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  std::vector<uint64_t> cuts(pieces), next(begins.begin(), begins.end() - 1);
  each_band([&](size_t b, const Rect& rect) {
    cuts[next[b]++] = rect.col;
    cuts[next[b]++] = rect.col_end;
  });
  size_t cell = 0;
  for (size_t b = 0; b < count; ++b) {
    const auto first = cuts.begin() + static_cast<ptrdiff_t>(begins[b]);
    auto last = cuts.begin() + static_cast<ptrdiff_t>(begins[b + 1]);
    std::sort(first, last);
    last = std::unique(first, last);
    bands_.push_back({col_cuts_.size(), cell});
    col_cuts_.insert(col_cuts_.end(), first, last);
    cell += first == last ? 0 : static_cast<size_t>(last - first) - 1;
  }
  bands_.push_back({col_cuts_.size(), cell});
  cells_.resize(cell);
  writes_ = {};
  return true;
}

uint64_t Memory::bytes() const {
  uint64_t summed = 0;
  for (const auto& [rect, summary] : summaries_) summed += sizeof(rect) + summary.capacity() * sizeof(Place) + 32;
  return summed + (row_cuts_.capacity() + col_cuts_.capacity()) * sizeof(uint64_t) + bands_.capacity() * sizeof(Band) +
         cells_.capacity() * sizeof(Cell) + nodes_.capacity() * sizeof(Node);
}

void Memory::note(Cell& cell, Place place) {
  for (uint32_t n = cell.readers; n != kNone; n = nodes_[n].next) {
    if (nodes_[n].chain != place.chain) continue;
    nodes_[n].position = place.position;
    return;
  }
  nodes_.push_back({place.chain, place.position, cell.readers});
  cell.readers = static_cast<uint32_t>(nodes_.size() - 1);
}

MemoryMap::MemoryMap(const PlanView& plan, uint32_t first)
    : plan_(plan), memory_(plan.tensors.size(), kNone), in_bytes_(plan.tensors.size(), 0) {
  const auto count = static_cast<uint32_t>(plan.tensors.size());
  std::vector<uint32_t> home(count);
  std::iota(home.begin(), home.end(), 0);
  const auto find = [&](uint32_t t) {
    while (home[t] != t) t = home[t] = home[home[t]];
    return t;
  };
  const auto join = [&](uint32_t a, uint32_t b) { home[find(a)] = find(b); };
  for (uint32_t t = 0; t < count; ++t) join(t, plan.tensors[t].storage);
  // Tensors whose bytes overlap lie in one memory. Inputs and outputs each have memory of their own.
  for (const Role role : {Role::kWorkspace, Role::kSymmetric}) {
    std::vector<uint32_t> placed;
    for (uint32_t t = 0; t < count; ++t) {
      if (plan.tensors[t].role == static_cast<uint32_t>(role) && plan.bytes_of(t) != 0) placed.push_back(t);
    }
    std::sort(placed.begin(), placed.end(),
              [&](uint32_t a, uint32_t b) { return plan.tensors[a].offset < plan.tensors[b].offset; });
    uint64_t reach = 0;
    for (size_t i = 0; i < placed.size(); ++i) {
      const uint64_t offset = plan.tensors[placed[i]].offset;
      if (i && offset < reach) join(placed[i], placed[i - 1]);
      reach = std::max(reach, offset + plan.bytes_of(placed[i]));
    }
  }
  std::vector<uint32_t> number(count, kNone), layout(count, kNone);
  std::vector<uint8_t> mixed(count, 0);
  for (uint32_t t = 0; t < count; ++t) {
    const TensorRecord& tensor = plan.tensors[t];
    if (tensor.role == static_cast<uint32_t>(Role::kInput)) continue;
    const uint32_t root = find(t);
    if (number[root] == kNone) number[root] = first + count_++;
    memory_[t] = number[root];
    if (plan.bytes_of(t) == 0) continue;
    if (layout[root] == kNone) layout[root] = t;
    const TensorRecord& other = plan.tensors[layout[root]];
    mixed[root] |= other.offset != tensor.offset || other.cols != tensor.cols || other.dtype != tensor.dtype;
  }
  for (uint32_t t = 0; t < count; ++t) in_bytes_[t] = mixed[find(t)];
}

AccessRecord MemoryMap::box_of(const AccessRecord& box, const Rect& rect) const {
  AccessRecord met = box;
  if (in_bytes_[box.tensor]) {
    const TensorRecord& tensor = plan_.tensors[box.tensor];
    const uint64_t item = plan_.bytes_of(box.tensor) / (tensor.rows * tensor.cols), line = tensor.cols * item;
    const uint64_t from = tensor.offset + uint64_t{box.row} * line + box.col * item;
    const uint64_t begin = std::max(rect.col, from) - tensor.offset, end = rect.col_end - tensor.offset;
    const uint64_t last = std::min<uint64_t>(uint64_t{box.row} + box.rows - 1, (end - 1) / line);
    met.row = static_cast<uint32_t>(begin / line);
    met.rows = static_cast<uint32_t>(last - met.row + 1);
    if (met.rows == 1) {
      met.col = static_cast<uint32_t>(begin % line / item);
      const uint64_t stop = std::min<uint64_t>((end - uint64_t{met.row} * line + item - 1) / item, box.col + box.cols);
      met.cols = static_cast<uint32_t>(stop - met.col);
    }
    return met;
  }
  const uint64_t row = std::max<uint64_t>(box.row, rect.row), col = std::max<uint64_t>(box.col, rect.col);
  met.row = static_cast<uint32_t>(row);
  met.col = static_cast<uint32_t>(col);
  met.rows = static_cast<uint32_t>(std::min(uint64_t{box.row} + box.rows, rect.row_end) - row);
  met.cols = static_cast<uint32_t>(std::min(uint64_t{box.col} + box.cols, rect.col_end) - col);
  return met;
}

}  // namespace hyper_mpmd::prove
