#include "hyper_mpmd/lent_gemm.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "lent_product.h"

namespace hyper_mpmd::kernels {
namespace {

LentGemm lent;
// 0: nothing is lent. It changes with each loan, so that threads initialised for an earlier one do it again.
std::atomic<uint32_t> loan{0};
std::atomic<uint32_t> loans{0};

constexpr int32_t kTorchFloat32 = 6;  // c10::ScalarType::Float
constexpr int32_t kTorchCpu = 0;      // c10::DeviceType::CPU

// A torch tensor on memory of ours, gone with the scope.
class Borrowed {
 public:
  Borrowed(const float* data, int64_t rows, int64_t cols, int64_t ld, bool transposed) {
    // torch's BLAS front end takes a matrix with one row or column only if its leading dimension is at least the other
    // size, which `ld` is by contract; for a transposed view sizes and strides change places.
    const int64_t sizes[2] = {transposed ? cols : rows, transposed ? rows : cols};
    const int64_t strides[2] = {transposed ? 1 : ld, transposed ? ld : 1};
    if (lent.create_tensor_from_blob(const_cast<float*>(data), 2, sizes, strides, 0, kTorchFloat32, kTorchCpu, 0,
                                     &tensor_) != 0) {
      throw std::runtime_error("torch could not wrap a tile of " + std::to_string(rows) + " x " + std::to_string(cols));
    }
  }
  ~Borrowed() { lent.delete_tensor(tensor_); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  void* get() const { return tensor_; }

 private:
  void* tensor_ = nullptr;
};

}  // namespace

bool lend_gemm(const LentGemm* gemm) {
  if (gemm == nullptr) {
    loan = 0;
    return true;
  }
  if (!gemm->create_tensor_from_blob || !gemm->delete_tensor || !gemm->mm_out || !gemm->get_num_threads ||
      !gemm->omp_set_num_threads) {
    return false;
  }
  lent = *gemm;
  loan = ++loans;
  return true;
}

bool gemm_is_lent() { return loan.load(std::memory_order_acquire) != 0; }

void lent_gemm_thread_init() {
  thread_local uint32_t initialised_for = 0;
  const uint32_t current = loan.load(std::memory_order_acquire);
  if (current == 0 || initialised_for == current) return;
  // at::set_num_threads would also store the count for every thread to come. Its lazy initialisation of this thread,
  // done now, cannot come later and undo the two thread-local settings below.
  lent.get_num_threads();
  lent.omp_set_num_threads(1);
  if (lent.mkl_set_num_threads_local) lent.mkl_set_num_threads_local(1);
  initialised_for = current;
}

void lent_product(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx, bool transpose_x, const float* w,
                  int64_t ldw, bool transpose_w, float* y, int64_t ldy) {
  if (!gemm_is_lent()) throw std::runtime_error("no gemm is lent: call hyper_mpmd.engine.torch_gemm.lend() first");
  const Borrowed left(x, transpose_x ? k : m, transpose_x ? m : k, ldx, transpose_x);
  const Borrowed right(w, transpose_w ? n : k, transpose_w ? k : n, ldw, transpose_w);
  const Borrowed out(y, m, n, ldy, false);
  if (lent.mm_out(out.get(), left.get(), right.get()) != 0) {
    throw std::runtime_error("torch's mm_out failed on a tile of " + std::to_string(m) + " x " + std::to_string(k) +
                             " times " + std::to_string(k) + " x " + std::to_string(n));
  }
}

}  // namespace hyper_mpmd::kernels
