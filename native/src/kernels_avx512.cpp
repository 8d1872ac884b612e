// The kernels for x86-64 with AVX-512 (F, BW, DQ, VL); CMakeLists.txt gives the flags.
#ifdef HYPER_MPMD_X86
#define HYPER_MPMD_ISA avx512
#define HYPER_MPMD_AVX512
#include "kernels_all.inl"
#endif
