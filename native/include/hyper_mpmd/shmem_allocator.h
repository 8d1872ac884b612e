// Symmetric offsets: the same calls in the same order give the same offsets on every rank, whatever else differs.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace hyper_mpmd::shmem {

// First fit over [0, capacity), in units of one cache line; neighbouring free blocks are joined.
class OffsetAllocator {
 public:
  static constexpr std::uint64_t kGranule = 64;

  explicit OffsetAllocator(std::uint64_t capacity);

  // Bytes an allocation of `bytes` takes: at least one granule, so that two allocations never share an offset.
  static std::uint64_t rounded(std::uint64_t bytes);

  // `alignment` is a power of two. Empty when no free block holds it.
  std::optional<std::uint64_t> allocate(std::uint64_t bytes, std::uint64_t alignment);
  // False when no live allocation starts at `offset`.
  bool free(std::uint64_t offset);

  // A capacity at which this request would have been served now.
  std::uint64_t capacity_needed(std::uint64_t bytes, std::uint64_t alignment) const;

  std::uint64_t capacity() const { return capacity_; }
  std::uint64_t used() const { return used_; }
  std::uint64_t peak() const { return peak_; }
  std::uint64_t largest_free() const;
  std::uint64_t live() const { return live_.size(); }

 private:
  std::uint64_t capacity_;
  std::uint64_t used_ = 0;
  std::uint64_t peak_ = 0;
  std::map<std::uint64_t, std::uint64_t> free_;  // offset -> bytes
  std::map<std::uint64_t, std::uint64_t> live_;
};

}  // namespace hyper_mpmd::shmem
