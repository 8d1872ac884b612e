// The L2 of a rank, followed in pages of its tensors: a page is held until as many bytes as the L2 has were brought in
// after the end of the task that used it last (of another rank's task: after its start). Tiles that run side by side
// stream through the same operands together, so what one of them has brought in the others find.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "hyper_mpmd/simulate.h"

namespace hyper_mpmd::simulate {

class L2 {
 public:
  L2(const PlanView& plan, int64_t bytes) : capacity_(bytes) {
    for (uint32_t t = 0; t < plan.tensors.size(); ++t) {
      const TensorRecord& tensor = plan.tensors[t];
      Tensor& mine = tensors_.emplace_back();
      mine.rows = tensor.rows;
      mine.cols = tensor.cols;
      mine.item = static_cast<int64_t>(tensor.rows && tensor.cols ? plan.bytes_of(t) / (tensor.rows * tensor.cols) : 0);
      mine.across = (tensor.cols + kPageCols - 1) / kPageCols;
      mine.pages = tensor.storage;
    }
    pages_.resize(tensors_.size());
    for (uint32_t t = 0; t < tensors_.size(); ++t) {
      const Tensor& mine = tensors_[t];
      if (mine.pages == t) pages_[t].resize((mine.rows + kPageRows - 1) / kPageRows * mine.across);
    }
    ended_.assign(plan.tasks.size(), kRunning);
  }

  int64_t bytes(const AccessRecord& box) const {
    return static_cast<int64_t>(box.rows) * box.cols * tensors_[box.tensor].item;
  }
  uint64_t rows(uint32_t tensor) const { return tensors_[tensor].rows; }

  // Bytes that have to come from the main memory. A page that came in parts is charged part by part until it is whole.
  // user: the number of a task of this rank, or kNone.
  int64_t read(const AccessRecord& box, uint32_t user) {
    int64_t missed = 0;
    each_page(box, user, [&](Page& page, int64_t bytes, int64_t whole) {
      const int64_t miss = std::min(bytes, whole - page.filled);
      page.filled += miss;
      missed += miss;
      return miss;
    });
    return missed;
  }
  // All bytes are written back once, sooner or later.
  int64_t write(const AccessRecord& box, uint32_t user) {
    each_page(box, user, [&](Page& page, int64_t bytes, int64_t whole) {
      page.filled = std::min(whole, page.filled + bytes);
      return bytes;
    });
    return bytes(box);
  }
  // The task of this rank has ended.
  void end(uint32_t user) { ended_[user] = brought_; }

 private:
  static constexpr int64_t kRunning = -1;

  struct Tensor {
    uint64_t rows, cols, across;
    int64_t item;
    uint32_t pages;
  };
  struct Page {
    int64_t stamp = 0, filled = 0;
    uint32_t user = kNone;
  };

  template <class Visit>
  void each_page(const AccessRecord& box, uint32_t user, Visit&& visit) {
    if (box.rows == 0 || box.cols == 0) return;
    const Tensor& t = tensors_[box.tensor];
    const uint64_t row_end = uint64_t{box.row} + box.rows, col_end = uint64_t{box.col} + box.cols;
    for (uint64_t row = box.row / kPageRows * kPageRows; row < row_end; row += kPageRows) {
      const uint64_t high = std::min(row + kPageRows, row_end) - std::max<uint64_t>(row, box.row);
      const uint64_t all_high = std::min<uint64_t>(kPageRows, t.rows - row);
      for (uint64_t col = box.col / kPageCols * kPageCols; col < col_end; col += kPageCols) {
        const uint64_t wide = std::min(col + kPageCols, col_end) - std::max<uint64_t>(col, box.col);
        const uint64_t all_wide = std::min<uint64_t>(kPageCols, t.cols - col);
        Page& page = pages_[t.pages][row / kPageRows * t.across + col / kPageCols];
        const int64_t used = page.user == kNone ? page.stamp : ended_[page.user];
        if (used != kRunning && brought_ - used >= capacity_) page.filled = 0;
        brought_ +=
            visit(page, static_cast<int64_t>(high * wide) * t.item, static_cast<int64_t>(all_high * all_wide) * t.item);
        page.stamp = brought_;
        page.user = user;
      }
    }
  }

  int64_t capacity_, brought_ = 0;
  std::vector<Tensor> tensors_;
  std::vector<std::vector<Page>> pages_;
  std::vector<int64_t> ended_;  // by task: what had been brought in when it ended
};

}  // namespace hyper_mpmd::simulate
