#include "hyper_mpmd/overlap.h"

#include <algorithm>

#include "wide.h"

namespace hyper_mpmd::planner {

void BoxIndex::build() {
  if (!std::is_sorted(boxes_.begin(), boxes_.end())) std::sort(boxes_.begin(), boxes_.end());
  bands_.clear();
  shared_.clear();
  tasks_.clear();
  shared_.reserve(boxes_.size());
  tasks_.reserve(boxes_.size());
  const Entry* before = nullptr;
  for (const Entry& box : boxes_) {
    const bool same_band = before && before->row == box.row && before->row_end == box.row_end;
    const bool same_box = same_band && before->col == box.col && before->col_end == box.col_end;
    const auto index = static_cast<uint32_t>(shared_.size()), task = static_cast<uint32_t>(tasks_.size());
    if (!same_band) {
      const uint32_t reach = bands_.empty() ? box.row_end : std::max(bands_.back().reach, box.row_end);
      bands_.push_back({box.row, box.row_end, reach, index, index});
    }
    if (!same_box) {
      const uint32_t reach = same_band ? std::max(shared_.back().reach, box.col_end) : box.col_end;
      shared_.push_back({box.col, box.col_end, reach, task, task});
      ++bands_.back().last_box;
    }
    tasks_.push_back(box.task);
    ++shared_.back().last_task;
    before = &box;
  }
  built_ = true;
}

uint64_t ListTable::hash(uint32_t salt, std::span<const uint32_t> list) {
  // Multiply and fold, a word at a time; the table compares contents, so that collisions only cost time.
  uint64_t h = 0x9e3779b97f4a7c15u ^ salt;
  for (uint32_t item : list) {
    const auto product = static_cast<u128>(h ^ item) * 0xa0761d6478bd642fu;
    h = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  return h;
}

std::pair<uint32_t, bool> ListTable::insert(uint32_t salt, std::span<const uint32_t> list) {
  if ((size() + 1) * 2 > slots_.size()) grow();
  const size_t mask = slots_.size() - 1;
  size_t slot = hash(salt, list) & mask;
  for (; slots_[slot]; slot = (slot + 1) & mask) {
    const uint32_t index = slots_[slot] - 1;
    if (salts_[index] == salt && std::ranges::equal((*this)[index], list)) return {index, false};
  }
  const auto index = static_cast<uint32_t>(size());
  items_.insert(items_.end(), list.begin(), list.end());
  begins_.push_back(items_.size());
  salts_.push_back(salt);
  slots_[slot] = index + 1;
  return {index, true};
}

void ListTable::grow() {
  const size_t count = std::max<size_t>(64, slots_.size() * 2), mask = count - 1;
  slots_.assign(count, 0);
  for (uint32_t index = 0; index < size(); ++index) {
    size_t slot = hash(salts_[index], (*this)[index]) & mask;
    while (slots_[slot]) slot = (slot + 1) & mask;
    slots_[slot] = index + 1;
  }
}

}  // namespace hyper_mpmd::planner
