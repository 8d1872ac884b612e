// The CPU kernels that the engine calls on tiles: plain functions on strided 2-D views.
//
// A view is a pointer to its first element and a leading dimension `ld*`: the distance, in elements, from one row to
// the next (at least the number of columns; rows are contiguous). Outputs must not overlap inputs. Sizes of zero are
// fine everywhere: nothing is read or written, except that a gemm over k = 0 writes zeros. `dtype` is kFloat32,
// kBFloat16 or kFloat16; arithmetic is in fp32 and a 16-bit result is rounded once, to nearest even. NaN stays NaN.
//
// Results depend on arguments only, never on pointers, alignment, thread or time, so that a tile gives the same bits on
// whichever worker runs it. They may differ between instruction sets and with what is lent (lent_gemm.h): both are
// settled once, before the first launch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "hyper_mpmd/dtype.h"
#include "hyper_mpmd/scratch.h"

namespace hyper_mpmd::kernels {

// y[m, n] = x · w. x is [m, k], or [k, m] with transpose_x; w is [k, n], or [n, k] with transpose_w; all row-major, all
// of `dtype`. fp32 accumulation throughout.
void gemm(DType dtype, int64_t m, int64_t n, int64_t k, const void* x, int64_t ldx, const void* w, int64_t ldw, void* y,
          int64_t ldy, Scratch& scratch, bool transpose_x = false, bool transpose_w = false);

// What the gemm with these arguments will take from its scratch: room for some 140 rows of x and a few strips in fp32.
size_t gemm_scratch_bytes(DType dtype, int64_t m, int64_t n, int64_t k);

// Two ways to the same product: our own kernels, or the multiply that torch lends (lent_gemm.h). gemm takes the one
// that gemm_way names, which depends on the instruction set, on whether anything is lent, and on m; tests and
// benchmarks take either. Throws std::runtime_error if the lent way is asked for and nothing is lent, or if torch
// reports a failure.
enum class GemmWay : uint8_t { kOwn = 0, kLent = 1 };
GemmWay gemm_way(int64_t m);
void gemm_by(GemmWay way, DType dtype, int64_t m, int64_t n, int64_t k, const void* x, int64_t ldx, const void* w,
             int64_t ldw, void* y, int64_t ldy, Scratch& scratch, bool transpose_x = false, bool transpose_w = false);

// out[r, c] = silu(gate[r, c]) * up[r, c], silu(g) = g / (1 + exp(-g)). As in torch, silu(-inf) is NaN. Here and in the
// next two, gate stands for min(gate, limit) and up for min(max(up, -limit), limit); a gradient is 0 where that changed
// the value, and NaN stays NaN.
inline constexpr float kNoLimit = std::numeric_limits<float>::infinity();
void swiglu(DType dtype, int64_t rows, int64_t cols, const void* gate, int64_t ldg, const void* up, int64_t ldu,
            void* out, int64_t ldo, float limit = kNoLimit);

// out[r, c] = weights[r] * silu(gate[r, c]) * up[r, c].
void weighted_swiglu(DType dtype, int64_t rows, int64_t cols, const void* gate, int64_t ldg, const void* up,
                     int64_t ldu, const float* weights, void* out, int64_t ldo, float limit = kNoLimit);

// The gradient of weights[r] * silu(gate) * up, given grad, that of the result divided by weights[r]:
//   d_gate[r, c] = weights[r] * grad[r, c] * up[r, c] * silu'(gate[r, c]), silu'(g) = s + g s (1 - s), s = 1 / (1 +
//   exp(-g)) d_up[r, c] = weights[r] * grad[r, c] * silu(gate[r, c]) dots[r] = sum over c of silu(gate[r, c]) * up[r,
//   c] * grad[r, c], the gradient of weights[r]
void swiglu_grad(DType dtype, int64_t rows, int64_t cols, const void* gate, int64_t ldg, const void* up, int64_t ldu,
                 const void* grad, int64_t ldd, const float* weights, void* d_gate, int64_t lddg, void* d_up,
                 int64_t lddu, float* dots, float limit = kNoLimit);

// out[r, c] = x[r, c], for any dtype.
void copy_rows(DType dtype, int64_t rows, int64_t cols, const void* x, int64_t ldx, void* out, int64_t ldo);

// What the indexed kernels return when every index is good; otherwise the position, in `index`, of the first bad one.
inline constexpr int64_t kIndexesGood = -1;

// out[r, :] = x[index[r], :], for any dtype, x of x_rows rows. Before anything is written every index is checked to be
// in [0, x_rows); a bad one leaves `out` untouched.
[[nodiscard]] int64_t gather_rows(DType dtype, int64_t rows, int64_t cols, const void* x, int64_t ldx, int64_t x_rows,
                                  const int32_t* index, void* out, int64_t ldo);

// out[t, :] = sum over j = 0 .. k-1, in this order, of weights[t, j] * y[index[t, j], :], in fp32, rounded once. index
// and weights are contiguous [tokens, k]; y has y_rows rows. Indexes are checked as in gather_rows. k = 0 writes zeros.
// Without weights (nullptr) each is 1.
[[nodiscard]] int64_t unpermute(DType dtype, int64_t tokens, int64_t k, int64_t cols, const void* y, int64_t ldy,
                                int64_t y_rows, const int32_t* index, const float* weights, void* out, int64_t ldo);

// out[r, c] = x[r, c] between fp32 and a 16-bit type (or a copy where the two are the same).
void convert(int64_t rows, int64_t cols, DType from, const void* x, int64_t ldx, DType to, void* out, int64_t ldo);

// Instruction sets that the kernels are compiled for. The best one that the processor has is picked at first use.
enum class Isa : uint8_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

Isa isa();
const char* isa_name(Isa isa);
bool isa_available(Isa isa);
// For tests and benchmarks, while no kernel runs. False, and no change, if this machine or build lacks it.
bool select_isa(Isa isa);

}  // namespace hyper_mpmd::kernels
