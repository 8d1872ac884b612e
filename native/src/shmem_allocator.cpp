#include "hyper_mpmd/shmem_allocator.h"

#include <algorithm>
#include <iterator>

namespace hyper_mpmd::shmem {

namespace {
std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}
}  // namespace

OffsetAllocator::OffsetAllocator(std::uint64_t capacity) : capacity_(capacity / kGranule * kGranule) {
  if (capacity_ > 0) free_.emplace(0, capacity_);
}

std::uint64_t OffsetAllocator::rounded(std::uint64_t bytes) {
  return align_up(std::max<std::uint64_t>(bytes, 1), kGranule);
}

std::optional<std::uint64_t> OffsetAllocator::allocate(std::uint64_t bytes, std::uint64_t alignment) {
  if (bytes > capacity_) return std::nullopt;  // also keeps the sums below far from 64 bits
  const std::uint64_t size = rounded(bytes);
  const std::uint64_t step = std::max(alignment, kGranule);
  for (auto block = free_.begin(); block != free_.end(); ++block) {
    const auto [start, room] = *block;
    const std::uint64_t at = align_up(start, step);
    if (at - start > room || room - (at - start) < size) continue;
    free_.erase(block);
    if (at > start) free_.emplace(start, at - start);
    if (at + size < start + room) free_.emplace(at + size, start + room - at - size);
    live_.emplace(at, size);
    used_ += size;
    peak_ = std::max(peak_, used_);
    return at;
  }
  return std::nullopt;
}

bool OffsetAllocator::free(std::uint64_t offset) {
  const auto found = live_.find(offset);
  if (found == live_.end()) return false;
  std::uint64_t start = found->first;
  std::uint64_t size = found->second;
  live_.erase(found);
  used_ -= size;
  auto next = free_.lower_bound(start);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == start) {
      start = before->first;
      size += before->second;
      free_.erase(before);
    }
  }
  if (next != free_.end() && start + size == next->first) {
    size += next->second;
    free_.erase(next);
  }
  free_.emplace(start, size);
  return true;
}

std::uint64_t OffsetAllocator::capacity_needed(std::uint64_t bytes, std::uint64_t alignment) const {
  std::uint64_t end = 0;
  if (!live_.empty()) end = live_.rbegin()->first + live_.rbegin()->second;
  return align_up(end, std::max(alignment, kGranule)) + rounded(bytes);
}

std::uint64_t OffsetAllocator::largest_free() const {
  std::uint64_t largest = 0;
  for (const auto& [start, size] : free_) largest = std::max(largest, size);
  return largest;
}

}  // namespace hyper_mpmd::shmem
