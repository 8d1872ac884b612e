#include "hyper_mpmd/scratch.h"

#include <new>

namespace hyper_mpmd::kernels {

Scratch::~Scratch() { ::operator delete(data_, std::align_val_t{kAlignment}); }

void* Scratch::take(size_t bytes) {
  if (bytes > capacity_) {
    ::operator delete(data_, std::align_val_t{kAlignment});
    data_ = nullptr;
    capacity_ = 0;
    data_ = ::operator new(bytes, std::align_val_t{kAlignment});
    capacity_ = bytes;
  }
  return data_;
}

}  // namespace hyper_mpmd::kernels
