// Where tensors lie in a workspace and in the symmetric buffers.
#include <algorithm>

#include "hyper_mpmd/planner.h"
#include "wide.h"

namespace hyper_mpmd::planner {

std::vector<TensorRecord> place_tensors(const Descriptor& descriptor, const Layout& layout, int64_t rank) {
  std::vector<TensorRecord> records;
  uint64_t offsets[4] = {};  // by role; only what the engine allocates has one
  const auto workspace = static_cast<int64_t>(Role::kWorkspace), symmetric = static_cast<int64_t>(Role::kSymmetric);
  for (size_t index = 0; index < descriptor.tensors.size(); ++index) {
    const TensorRow& tensor = descriptor.tensors[index];
    TensorRecord record{};
    record.dtype = static_cast<uint32_t>(tensor.dtype);
    record.role = static_cast<uint32_t>(tensor.role);
    record.storage = static_cast<uint32_t>(tensor.storage);
    int64_t rows = layout.tensor_rows(tensor, rank);
    record.rows = static_cast<uint64_t>(rows);
    record.cols = static_cast<uint64_t>(tensor.cols);
    if (tensor.role == symmetric) {  // the same offsets on every rank: room for the rank with most rows
      for (int64_t r = 0; r < descriptor.ranks; ++r) rows = std::max(rows, layout.tensor_rows(tensor, r));
    }
    record.most_rows = static_cast<uint32_t>(rows);
    const bool placed = tensor.role == workspace || tensor.role == symmetric;
    const u128 size = static_cast<u128>(rows) * static_cast<u128>(tensor.cols) * static_cast<u128>(tensor.item_bytes);
    const u128 after =
        (placed ? offsets[tensor.role] : 0) + (size + kAlignment - 1) / kAlignment * static_cast<u128>(kAlignment);
    if (after > kMaxBytes) {
      throw PlanLimit("tensor '" + descriptor.tensor_names[index] + "' takes " + decimal(size) +
                      " bytes, and those of its kind together " + decimal(after) + "; the limit is " +
                      std::to_string(kMaxBytes));
    }
    if (placed) {
      if (tensor.storage == static_cast<int64_t>(index)) {
        record.offset = offsets[tensor.role];
        offsets[tensor.role] = static_cast<uint64_t>(after);
      } else {
        record.offset = records[tensor.storage].offset;
      }
    }
    records.push_back(record);
  }
  return records;
}

}  // namespace hyper_mpmd::planner
