// Element types of tensors, as every native part and the binary plan number them.
#pragma once

#include <cstdint>

namespace hyper_mpmd {

enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kInt32 = 2, kInt64 = 3 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return 2;
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      break;
  }
  return 4;
}

}  // namespace hyper_mpmd
