// Working memory of one worker: kernels borrow from it and give back, so that no tile pays for an allocation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hyper_mpmd::kernels {

inline constexpr size_t kAlignment = 64;  // a cache line, and the widest vector

// One block of 64-byte-aligned memory that only ever grows. Not thread-safe: one per worker. What it lends is valid
// until the next call; a kernel that needs several pieces asks for their sum.
class Scratch {
 public:
  Scratch() = default;
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  // At least `bytes` of memory with undefined contents, 64-byte aligned. Throws std::bad_alloc, and then holds nothing.
  void* take(size_t bytes);
  // Grow ahead of the launch (with gemm_scratch_bytes), so that no kernel allocates during it.
  void reserve(size_t bytes) { take(bytes); }
  size_t capacity() const { return capacity_; }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace hyper_mpmd::kernels
