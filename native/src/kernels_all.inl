// Everything that is compiled once per instruction set. The including file names the set.

#if defined(HYPER_MPMD_AVX512) || defined(HYPER_MPMD_AVX2)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernel_table.h"

namespace hyper_mpmd::kernels::HYPER_MPMD_ISA {

// clang-format off: each needs the one before
#include "kernels_simd.inl"
#include "kernels_elementwise.inl"
#include "kernels_gemm.inl"
// clang-format on

extern const KernelTable kTable;
const KernelTable kTable = {
    gemm_scratch_bytes,
    gemm<float>,
    gemm<uint16_t>,
    gemm<Half>,
    swiglu<float>,
    swiglu<uint16_t>,
    swiglu<Half>,
    weighted_swiglu<float>,
    weighted_swiglu<uint16_t>,
    weighted_swiglu<Half>,
    swiglu_grad<float>,
    swiglu_grad<uint16_t>,
    swiglu_grad<Half>,
    unpermute<float>,
    unpermute<uint16_t>,
    unpermute<Half>,
    convert<uint16_t, float>,
    convert<Half, float>,
    convert<float, uint16_t>,
    convert<float, Half>,
};

}  // namespace hyper_mpmd::kernels::HYPER_MPMD_ISA
