// Who touched each piece of memory last, so that a new access need only be compared with those.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hyper_mpmd/prove.h"

namespace hyper_mpmd::prove {

// Rows and columns of a matrix, or (one row) bytes of memory that is seen through several layouts.
struct Rect {
  uint64_t row, row_end, col, col_end;
  bool operator==(const Rect&) const = default;
  bool empty() const { return row >= row_end || col >= col_end; }
  bool meets(const Rect& other) const {
    return row < other.row_end && other.row < row_end && col < other.col_end && other.col < col_end;
  }
};

// A task by its place: the number of its queue among all, and its position there, from 1.
struct Place {
  uint32_t chain, position;
};

// One piece of memory. The boxes that are ever written cut it into cells, so that a write covers cells as a whole, and
// whoever touches a cell meets whoever wrote or will write it.
class Memory {
 public:
  // First all writes are announced, in any order, then `build`, then `write` and `read` in an order in which no task
  // comes before one that it waits for.
  void announce(const Rect& rect);
  // False where the writes cut the memory into more pieces than can be held.
  bool build();
  bool written() const { return !row_cuts_.empty(); }
  uint64_t bytes() const;

  // earlier(place) says whether the task there has ended before this access begins. The first for which it is false is
  // returned; nothing otherwise.
  template <class Earlier>
  bool write(const Rect& rect, Place place, Earlier&& earlier, std::pair<Place, bool>& culprit);
  template <class Earlier>
  bool read(const Rect& rect, Place place, Earlier&& earlier, std::pair<Place, bool>& culprit);

  bool from_peers = false;  // whether other ranks write it

 private:
  struct Cell {
    uint32_t writer = kNone, position = 0;  // who wrote it last
    uint32_t readers = kNone;               // who has read it since, the first in nodes_
  };
  struct Node {
    uint32_t chain, position, next;
  };
  struct Band {
    size_t first_cut, first_cell;
  };
  struct Hash {
    size_t operator()(const Rect& r) const {
      uint64_t h = r.row * 0x9e3779b97f4a7c15u ^ r.row_end;
      h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9u ^ r.col;
      return static_cast<size_t>((h ^ h >> 32) * 0x94d049bb133111ebu ^ r.col_end);
    }
  };
  // What many cells' last writers come to: the last position on each queue. Reads of much memory by many tasks (rows
  // chosen by data) would otherwise visit each cell each time.
  using Summary = std::vector<Place>;
  static constexpr size_t kMany = 16;

  // Call visit(cell) for each cell that meets the rect, until it returns false.
  template <class Visit>
  bool cells(const Rect& rect, Visit&& visit);
  void note(Cell& cell, Place place);

  std::vector<uint64_t> row_cuts_, col_cuts_;
  std::vector<Rect> writes_;  // until built
  std::vector<Band> bands_;
  std::vector<Cell> cells_;
  std::vector<Node> nodes_;
  std::unordered_map<Rect, Summary, Hash> summaries_;
  uint64_t writes_left_ = 0;
  size_t band_ = 0;  // of the last visit: the next is seldom far
};

template <class Visit>
bool Memory::cells(const Rect& rect, Visit&& visit) {
  if (rect.empty() || bands_.empty()) return true;
  const auto band_of = [&](uint64_t row) {
    const auto after = std::upper_bound(row_cuts_.begin(), row_cuts_.end(), row);
    return after == row_cuts_.begin() ? size_t{0} : static_cast<size_t>(after - row_cuts_.begin()) - 1;
  };
  if (band_ >= bands_.size() - 1 || row_cuts_[band_] > rect.row || row_cuts_[band_ + 1] <= rect.row) {
    band_ = band_of(rect.row);
  }
  for (size_t b = band_; b + 1 < bands_.size() && row_cuts_[b] < rect.row_end; ++b) {
    const auto first = col_cuts_.begin() + static_cast<ptrdiff_t>(bands_[b].first_cut);
    const auto last = col_cuts_.begin() + static_cast<ptrdiff_t>(bands_[b + 1].first_cut);
    auto cut = std::upper_bound(first, last, rect.col);
    if (cut != first) --cut;
    for (; cut != last && cut + 1 != last && *cut < rect.col_end; ++cut) {
      if (!visit(cells_[bands_[b].first_cell + static_cast<size_t>(cut - first)])) return false;
    }
  }
  return true;
}

template <class Earlier>
bool Memory::write(const Rect& rect, Place place, Earlier&& earlier, std::pair<Place, bool>& culprit) {
  --writes_left_;
  return cells(rect, [&](Cell& cell) {
    if (cell.writer != kNone && !earlier(Place{cell.writer, cell.position})) {
      culprit = {{cell.writer, cell.position}, true};
      return false;
    }
    for (uint32_t n = cell.readers; n != kNone; n = nodes_[n].next) {
      if (earlier(Place{nodes_[n].chain, nodes_[n].position})) continue;
      culprit = {{nodes_[n].chain, nodes_[n].position}, false};
      return false;
    }
    cell = {place.chain, place.position, kNone};
    return true;
  });
}

template <class Earlier>
bool Memory::read(const Rect& rect, Place place, Earlier&& earlier, std::pair<Place, bool>& culprit) {
  if (writes_left_ == 0) {
    if (const auto known = summaries_.find(rect); known != summaries_.end()) {
      for (const Place& writer : known->second) {
        if (earlier(writer)) continue;
        culprit = {writer, true};
        return false;
      }
      return true;
    }
  }
  size_t count = 0;
  const bool fine = cells(rect, [&](Cell& cell) {
    ++count;
    if (cell.writer != kNone && !earlier(Place{cell.writer, cell.position})) {
      culprit = {{cell.writer, cell.position}, true};
      return false;
    }
    if (writes_left_ != 0) note(cell, place);
    return true;
  });
  if (!fine || writes_left_ != 0 || count < kMany) return fine;
  std::unordered_map<uint32_t, uint32_t> latest;
  cells(rect, [&](const Cell& cell) {
    if (cell.writer != kNone) {
      uint32_t& position = latest[cell.writer];
      position = std::max(position, cell.position);
    }
    return true;
  });
  Summary& summary = summaries_[rect];
  for (const auto& [chain, position] : latest) summary.push_back({chain, position});
  return true;
}

// The rects of each tensor of one plan, and the memories behind them.
class MemoryMap {
 public:
  // Numbers for the memories that the plan writes or peers may write, from `first` on.
  MemoryMap(const PlanView& plan, uint32_t first);
  uint32_t count() const { return count_; }
  // kNone: nobody writes it
  uint32_t of(uint32_t tensor) const { return memory_[tensor]; }

  // Call visit(rect) for the pieces of the box of a tensor of that memory, until it returns false.
  template <class Visit>
  bool rects(const AccessRecord& box, Visit&& visit) const;
  // The rows and columns of a tensor that a rect covers, which meets the box.
  AccessRecord box_of(const AccessRecord& box, const Rect& rect) const;

 private:
  const PlanView& plan_;
  uint32_t count_ = 0;
  std::vector<uint32_t> memory_;
  std::vector<uint8_t> in_bytes_;  // [tensor] whether its memory is seen through several layouts
};

template <class Visit>
bool MemoryMap::rects(const AccessRecord& box, Visit&& visit) const {
  const uint64_t row_end = uint64_t{box.row} + box.rows, col_end = uint64_t{box.col} + box.cols;
  if (box.rows == 0 || box.cols == 0) return true;
  if (!in_bytes_[box.tensor]) return visit(Rect{box.row, row_end, box.col, col_end});
  const TensorRecord& tensor = plan_.tensors[box.tensor];
  const uint64_t item = plan_.bytes_of(box.tensor) / (tensor.rows * tensor.cols), line = tensor.cols * item;
  const bool whole = box.cols == tensor.cols;
  for (uint64_t row = box.row; row < row_end; row += whole ? box.rows : 1) {
    const uint64_t begin = tensor.offset + row * line + box.col * item;
    const uint64_t bytes = whole ? box.rows * line : box.cols * item;
    if (!visit(Rect{0, 1, begin, begin + bytes})) return false;
  }
  return true;
}

}  // namespace hyper_mpmd::prove
