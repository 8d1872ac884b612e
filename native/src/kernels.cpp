#include "hyper_mpmd/kernels.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "hyper_mpmd/lent_gemm.h"
#include "kernel_table.h"
#include "lent_product.h"

namespace hyper_mpmd::kernels {
namespace {

const KernelTable* table_of(Isa isa) {
  switch (isa) {
#ifdef HYPER_MPMD_X86
    case Isa::kAvx2:
      return &avx2::kTable;
    case Isa::kAvx512:
      return &avx512::kTable;
#endif
    case Isa::kBaseline:
      return &baseline::kTable;
    default:
      return nullptr;
  }
}

Isa best_isa() {
  for (Isa candidate : {Isa::kAvx512, Isa::kAvx2}) {
    if (isa_available(candidate)) return candidate;
  }
  return Isa::kBaseline;
}

std::atomic<Isa>& chosen_isa() {
  static std::atomic<Isa> chosen{best_isa()};
  return chosen;
}

const KernelTable& table() { return *table_of(isa()); }

// Up to here our baseline kernel, which reads the weights once and in place, is no slower than a lent gemm, which packs
// them.
constexpr int64_t kLentFromRows = 9;

int64_t first_bad(const int32_t* index, int64_t count, int64_t rows) {
  for (int64_t i = 0; i < count; ++i) {
    if (index[i] < 0 || index[i] >= rows) return i;
  }
  return kIndexesGood;
}

const uint16_t* bf16(const void* data) { return static_cast<const uint16_t*>(data); }
uint16_t* bf16(void* data) { return static_cast<uint16_t*>(data); }
const Half* fp16(const void* data) { return static_cast<const Half*>(data); }
Half* fp16(void* data) { return static_cast<Half*>(data); }
const float* fp32(const void* data) { return static_cast<const float*>(data); }
float* fp32(void* data) { return static_cast<float*>(data); }

size_t lent_scratch_floats(DType dtype, int64_t m, int64_t n, int64_t k) {
  return is_half(dtype) ? static_cast<size_t>(m * k + k * n + m * n) : 0;
}

void gemm_lent(DType dtype, const GemmArgs& a) {
  if (dtype == DType::kFloat32) {
    lent_product(a.m, a.n, a.k, fp32(a.x), a.ldx, a.transpose_x, fp32(a.w), a.ldw, a.transpose_w, fp32(a.y), a.ldy);
    return;
  }
  float *x = a.scratch, *w = x + a.m * a.k, *y = w + a.k * a.n;
  const int64_t x_rows = a.transpose_x ? a.k : a.m, x_cols = a.transpose_x ? a.m : a.k;
  const int64_t w_rows = a.transpose_w ? a.n : a.k, w_cols = a.transpose_w ? a.k : a.n;
  convert(x_rows, x_cols, dtype, a.x, a.ldx, DType::kFloat32, x, x_cols);
  convert(w_rows, w_cols, dtype, a.w, a.ldw, DType::kFloat32, w, w_cols);
  lent_product(a.m, a.n, a.k, x, x_cols, a.transpose_x, w, w_cols, a.transpose_w, y, a.n);
  convert(a.m, a.n, DType::kFloat32, y, a.n, dtype, a.y, a.ldy);
}

void fill_zero(DType dtype, int64_t rows, int64_t cols, void* out, int64_t ldo) {
  const size_t element = static_cast<size_t>(size_of(dtype));
  for (int64_t row = 0; row < rows; ++row) {
    std::memset(static_cast<char*>(out) + static_cast<size_t>(row * ldo) * element, 0,
                static_cast<size_t>(cols) * element);
  }
}

}  // namespace

Isa isa() { return chosen_isa().load(std::memory_order_relaxed); }

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kBaseline:
      break;
  }
  return "baseline";
}

bool isa_available(Isa isa) {
#ifdef HYPER_MPMD_X86
  __builtin_cpu_init();
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (isa == Isa::kAvx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return isa == Isa::kBaseline;
}

bool select_isa(Isa isa) {
  if (!isa_available(isa)) return false;
  chosen_isa().store(isa, std::memory_order_relaxed);
  return true;
}

GemmWay gemm_way(int64_t m) {
  // Measured (benchmarks/kernels.py): with AVX2 or AVX-512 our own gemm is as fast as the lent one or faster at every
  // shape.
  return isa() == Isa::kBaseline && m >= kLentFromRows && gemm_is_lent() ? GemmWay::kLent : GemmWay::kOwn;
}

size_t gemm_scratch_bytes(DType dtype, int64_t m, int64_t n, int64_t k) {
  if (m <= 0 || n <= 0 || k <= 0) return 0;
  if (gemm_way(m) == GemmWay::kLent) return lent_scratch_floats(dtype, m, n, k) * sizeof(float);
  return table().gemm_scratch_bytes(is_half(dtype), m, n, k);
}

void gemm_by(GemmWay way, DType dtype, int64_t m, int64_t n, int64_t k, const void* x, int64_t ldx, const void* w,
             int64_t ldw, void* y, int64_t ldy, Scratch& scratch, bool transpose_x, bool transpose_w) {
  if (m <= 0 || n <= 0) return;
  if (k <= 0) {
    fill_zero(dtype, m, n, y, ldy);
    return;
  }
  const size_t bytes = way == GemmWay::kLent ? lent_scratch_floats(dtype, m, n, k) * sizeof(float)
                                             : table().gemm_scratch_bytes(is_half(dtype), m, n, k);
  const GemmArgs args{m, n, k, x, ldx, w, ldw, y, ldy, transpose_x, transpose_w, fp32(scratch.take(bytes))};
  if (way == GemmWay::kLent) {
    gemm_lent(dtype, args);
  } else if (dtype == DType::kBFloat16) {
    table().gemm_bfloat16(args);
  } else if (dtype == DType::kFloat16) {
    table().gemm_float16(args);
  } else {
    table().gemm_float32(args);
  }
}

void gemm(DType dtype, int64_t m, int64_t n, int64_t k, const void* x, int64_t ldx, const void* w, int64_t ldw, void* y,
          int64_t ldy, Scratch& scratch, bool transpose_x, bool transpose_w) {
  gemm_by(gemm_way(m), dtype, m, n, k, x, ldx, w, ldw, y, ldy, scratch, transpose_x, transpose_w);
}

void swiglu(DType dtype, int64_t rows, int64_t cols, const void* gate, int64_t ldg, const void* up, int64_t ldu,
            void* out, int64_t ldo, float limit) {
  if (dtype == DType::kBFloat16) {
    table().swiglu_bfloat16(rows, cols, bf16(gate), ldg, bf16(up), ldu, bf16(out), ldo, limit);
  } else if (dtype == DType::kFloat16) {
    table().swiglu_float16(rows, cols, fp16(gate), ldg, fp16(up), ldu, fp16(out), ldo, limit);
  } else {
    table().swiglu_float32(rows, cols, fp32(gate), ldg, fp32(up), ldu, fp32(out), ldo, limit);
  }
}

void weighted_swiglu(DType dtype, int64_t rows, int64_t cols, const void* gate, int64_t ldg, const void* up,
                     int64_t ldu, const float* weights, void* out, int64_t ldo, float limit) {
  if (dtype == DType::kBFloat16) {
    table().weighted_swiglu_bfloat16(rows, cols, bf16(gate), ldg, bf16(up), ldu, weights, bf16(out), ldo, limit);
  } else if (dtype == DType::kFloat16) {
    table().weighted_swiglu_float16(rows, cols, fp16(gate), ldg, fp16(up), ldu, weights, fp16(out), ldo, limit);
  } else {
    table().weighted_swiglu_float32(rows, cols, fp32(gate), ldg, fp32(up), ldu, weights, fp32(out), ldo, limit);
  }
}

void swiglu_grad(DType dtype, int64_t rows, int64_t cols, const void* gate, int64_t ldg, const void* up, int64_t ldu,
                 const void* grad, int64_t ldd, const float* weights, void* d_gate, int64_t lddg, void* d_up,
                 int64_t lddu, float* dots, float limit) {
  const SwiGLUGradArgs args{rows, cols, gate, ldg, up, ldu, grad, ldd, weights, d_gate, lddg, d_up, lddu, dots, limit};
  if (dtype == DType::kBFloat16) {
    table().swiglu_grad_bfloat16(args);
  } else if (dtype == DType::kFloat16) {
    table().swiglu_grad_float16(args);
  } else {
    table().swiglu_grad_float32(args);
  }
}

void copy_rows(DType dtype, int64_t rows, int64_t cols, const void* x, int64_t ldx, void* out, int64_t ldo) {
  if (rows <= 0 || cols <= 0) return;
  const int64_t element = size_of(dtype);
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(out);
  if (ldx == cols && ldo == cols) {
    std::memcpy(to, from, static_cast<size_t>(rows * cols * element));
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * ldo * element, from + row * ldx * element, static_cast<size_t>(cols * element));
  }
}

int64_t gather_rows(DType dtype, int64_t rows, int64_t cols, const void* x, int64_t ldx, int64_t x_rows,
                    const int32_t* index, void* out, int64_t ldo) {
  if (int64_t bad = first_bad(index, rows, x_rows); bad != kIndexesGood) return bad;
  if (cols <= 0) return kIndexesGood;
  const int64_t element = size_of(dtype);
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(out);
  for (int64_t row = 0; row < rows; ++row) {
    std::memcpy(to + row * ldo * element, from + index[row] * ldx * element, static_cast<size_t>(cols * element));
  }
  return kIndexesGood;
}

int64_t unpermute(DType dtype, int64_t tokens, int64_t k, int64_t cols, const void* y, int64_t ldy, int64_t y_rows,
                  const int32_t* index, const float* weights, void* out, int64_t ldo) {
  if (int64_t bad = first_bad(index, tokens * k, y_rows); bad != kIndexesGood) return bad;
  if (dtype == DType::kBFloat16) {
    table().unpermute_bfloat16(tokens, k, cols, bf16(y), ldy, index, weights, bf16(out), ldo);
  } else if (dtype == DType::kFloat16) {
    table().unpermute_float16(tokens, k, cols, fp16(y), ldy, index, weights, fp16(out), ldo);
  } else {
    table().unpermute_float32(tokens, k, cols, fp32(y), ldy, index, weights, fp32(out), ldo);
  }
  return kIndexesGood;
}

void convert(int64_t rows, int64_t cols, DType from, const void* x, int64_t ldx, DType to, void* out, int64_t ldo) {
  if (from == to) {
    copy_rows(from, rows, cols, x, ldx, out, ldo);
  } else if (from == DType::kBFloat16) {
    table().widen_bfloat16(rows, cols, bf16(x), ldx, fp32(out), ldo);
  } else if (from == DType::kFloat16) {
    table().widen_float16(rows, cols, fp16(x), ldx, fp32(out), ldo);
  } else if (to == DType::kBFloat16) {
    table().narrow_bfloat16(rows, cols, fp32(x), ldx, bf16(out), ldo);
  } else {
    table().narrow_float16(rows, cols, fp32(x), ldx, fp16(out), ldo);
  }
}

}  // namespace hyper_mpmd::kernels
