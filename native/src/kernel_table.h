// What one compilation of the kernels offers. kernels_<isa>.cpp compile the same source with different flags and
// namespaces; kernels.cpp picks a table at run time.
//
// Only plain declarations may stand here and in the *.inl files: an inline function of a shared header, compiled with
// AVX-512 flags, could be the copy that the linker keeps for everybody.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace hyper_mpmd::kernels {

// An IEEE binary16; plain uint16_t stands for a bfloat16.
struct Half {
  uint16_t bits;
};

struct GemmArgs {
  int64_t m, n, k;
  const void* x;
  int64_t ldx;
  const void* w;
  int64_t ldw;
  void* y;
  int64_t ldy;
  bool transpose_x, transpose_w;
  float* scratch;  // 64-byte aligned
};

struct SwiGLUGradArgs {
  int64_t rows, cols;
  const void* gate;
  int64_t ldg;
  const void* up;
  int64_t ldu;
  const void* grad;
  int64_t ldd;
  const float* weights;
  void* d_gate;
  int64_t lddg;
  void* d_up;
  int64_t lddu;
  float* dots;
  float limit;
};

struct KernelTable {
  size_t (*gemm_scratch_bytes)(bool half, int64_t m, int64_t n, int64_t k);
  void (*gemm_float32)(const GemmArgs& args);
  void (*gemm_bfloat16)(const GemmArgs& args);
  void (*gemm_float16)(const GemmArgs& args);
  void (*swiglu_float32)(int64_t rows, int64_t cols, const float* gate, int64_t ldg, const float* up, int64_t ldu,
                         float* out, int64_t ldo, float limit);
  void (*swiglu_bfloat16)(int64_t rows, int64_t cols, const uint16_t* gate, int64_t ldg, const uint16_t* up,
                          int64_t ldu, uint16_t* out, int64_t ldo, float limit);
  void (*swiglu_float16)(int64_t rows, int64_t cols, const Half* gate, int64_t ldg, const Half* up, int64_t ldu,
                         Half* out, int64_t ldo, float limit);
  void (*weighted_swiglu_float32)(int64_t rows, int64_t cols, const float* gate, int64_t ldg, const float* up,
                                  int64_t ldu, const float* weights, float* out, int64_t ldo, float limit);
  void (*weighted_swiglu_bfloat16)(int64_t rows, int64_t cols, const uint16_t* gate, int64_t ldg, const uint16_t* up,
                                   int64_t ldu, const float* weights, uint16_t* out, int64_t ldo, float limit);
  void (*weighted_swiglu_float16)(int64_t rows, int64_t cols, const Half* gate, int64_t ldg, const Half* up,
                                  int64_t ldu, const float* weights, Half* out, int64_t ldo, float limit);
  void (*swiglu_grad_float32)(const SwiGLUGradArgs& args);
  void (*swiglu_grad_bfloat16)(const SwiGLUGradArgs& args);
  void (*swiglu_grad_float16)(const SwiGLUGradArgs& args);
  void (*unpermute_float32)(int64_t tokens, int64_t k, int64_t cols, const float* y, int64_t ldy, const int32_t* index,
                            const float* weights, float* out, int64_t ldo);
  void (*unpermute_bfloat16)(int64_t tokens, int64_t k, int64_t cols, const uint16_t* y, int64_t ldy,
                             const int32_t* index, const float* weights, uint16_t* out, int64_t ldo);
  void (*unpermute_float16)(int64_t tokens, int64_t k, int64_t cols, const Half* y, int64_t ldy, const int32_t* index,
                            const float* weights, Half* out, int64_t ldo);
  void (*widen_bfloat16)(int64_t rows, int64_t cols, const uint16_t* x, int64_t ldx, float* out, int64_t ldo);
  void (*widen_float16)(int64_t rows, int64_t cols, const Half* x, int64_t ldx, float* out, int64_t ldo);
  void (*narrow_bfloat16)(int64_t rows, int64_t cols, const float* x, int64_t ldx, uint16_t* out, int64_t ldo);
  void (*narrow_float16)(int64_t rows, int64_t cols, const float* x, int64_t ldx, Half* out, int64_t ldo);
};

namespace baseline {
extern const KernelTable kTable;
}
#ifdef HYPER_MPMD_X86
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#endif

}  // namespace hyper_mpmd::kernels
