// Which earlier tasks touched a box? An index over boxes, so that lowering need not compare each with each.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace hyper_mpmd::planner {

struct Box {
  uint32_t row, rows, col, cols;
};

// Boxes of tasks. Boxes of the same rows form a band; bands are sorted by row, boxes within one by column. Tiles of one
// op cut a tensor into bands that do not overlap, so a look-up is a binary search; boxes that do overlap (readers) only
// make it visit more.
class BoxIndex {
 public:
  void add(const Box& box, uint32_t task) {
    if (box.rows && box.cols) {
      boxes_.push_back({box.row, box.row + box.rows, box.col, box.col + box.cols, task});
      built_ = false;
    }
  }
  void reserve(size_t count) { boxes_.reserve(count); }

  // Call visit(entry) for each distinct indexed box that shares a point with `box`.
  template <class Visit>
  void overlapping(const Box& box, Visit&& visit) {
    if (!box.rows || !box.cols) return;
    if (!built_) build();
    const uint32_t row_end = box.row + box.rows, col_end = box.col + box.cols;
    for (size_t b = first(bands_, 0, bands_.size(), box.row); b < bands_.size() && bands_[b].begin < row_end; ++b) {
      const Band& band = bands_[b];
      if (band.end <= box.row) continue;
      size_t i = band.first_box;
      if (shared_[i].reach <= box.col) i = first(shared_, band.first_box, band.last_box, box.col);
      for (; i < band.last_box && shared_[i].begin < col_end; ++i) {
        if (shared_[i].end > box.col) visit(static_cast<uint32_t>(i));
      }
    }
  }

  // The tasks of one of those boxes, ascending.
  std::span<const uint32_t> tasks(uint32_t entry) const {
    return std::span(tasks_).subspan(shared_[entry].first_task, shared_[entry].last_task - shared_[entry].first_task);
  }

 private:
  struct Entry {
    uint32_t row, row_end, col, col_end, task;
    auto operator<=>(const Entry&) const = default;
  };
  // `reach`: the largest end so far in this order.
  struct Band {
    uint32_t begin, end, reach, first_box, last_box;
  };
  struct Shared {
    uint32_t begin, end, reach, first_task, last_task;
  };
  template <class Item>
  static size_t first(const std::vector<Item>& items, size_t low, size_t high, uint32_t after) {
    while (low < high) {
      size_t middle = low + (high - low) / 2;
      if (items[middle].reach > after) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
  void build();

  std::vector<Entry> boxes_;
  std::vector<Band> bands_;
  std::vector<Shared> shared_;
  std::vector<uint32_t> tasks_;
  bool built_ = true;
};

// Lists of numbers, each stored once, found again by content.
class ListTable {
 public:
  // The index of `list` under `salt`, and whether it is new. An index is never given twice, whatever the salt.
  std::pair<uint32_t, bool> insert(uint32_t salt, std::span<const uint32_t> list);
  std::span<const uint32_t> operator[](size_t index) const {
    return std::span(items_).subspan(begins_[index], begins_[index + 1] - begins_[index]);
  }
  size_t size() const { return salts_.size(); }
  size_t item_count() const { return items_.size(); }

 private:
  void grow();
  static uint64_t hash(uint32_t salt, std::span<const uint32_t> list);

  std::vector<uint32_t> items_;
  std::vector<size_t> begins_{0};
  std::vector<uint32_t> salts_;
  std::vector<uint32_t> slots_;  // open addressing; index + 1, 0 is free
};

}  // namespace hyper_mpmd::planner
