// Element types of tensors, as every native part and the binary plan number them.
#pragma once

#include <cstdint>

namespace hyper_mpmd {

enum class DType : uint8_t { kFloat32 = 0, kBFloat16 = 1, kInt32 = 2, kInt64 = 3, kFloat16 = 4 };
inline constexpr uint32_t kDTypeCount = 5;

// Two bytes a number: computed in fp32 and rounded once.
constexpr bool is_half(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
    case DType::kFloat16:
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
