// A matrix multiply lent by torch through C symbols of its library, so that the core itself stays free of torch.
//
// hyper_mpmd/engine/torch_gemm.py finds the symbols in the libraries that torch has loaded and hands their addresses
// over once; without them the kernels use their own gemm.
#pragma once

#include <cstdint>

namespace hyper_mpmd::kernels {

// Signatures as in torch/csrc/inductor/aoti_torch/c/shim.h and generated/c_shim_cpu.h (torch 2.13); 0 is success.
struct LentGemm {
  int32_t (*create_tensor_from_blob)(void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides,
                                     int64_t storage_offset, int32_t dtype, int32_t device_type, int32_t device_index,
                                     void** tensor) = nullptr;
  int32_t (*delete_tensor)(void* tensor) = nullptr;
  int32_t (*mm_out)(void* out, void* left, void* right) = nullptr;
  // at::get_num_threads: its first call in a thread settles that thread's OpenMP count, so it must come before ours.
  int (*get_num_threads)() = nullptr;
  // The OpenMP and MKL counts of the calling thread only. MKL's is missing in builds without MKL.
  void (*omp_set_num_threads)(int threads) = nullptr;
  int (*mkl_set_num_threads_local)(int threads) = nullptr;
};

// Lend, or with nullptr take back. Not while a kernel runs. All but the MKL function must be there, else returns false.
bool lend_gemm(const LentGemm* gemm);
bool gemm_is_lent();

// To be called by every worker thread before its first task, never in a thread of the user's: whatever torch code runs
// in this thread from now on, the lent gemm or a Python kernel, runs on one thread, and no other thread, present or
// future, is affected. Does nothing when nothing is lent. Cheap to repeat.
void lent_gemm_thread_init();

}  // namespace hyper_mpmd::kernels
