// The kernels for x86-64 with AVX2 and FMA; CMakeLists.txt gives the flags.
#ifdef HYPER_MPMD_X86
#define HYPER_MPMD_ISA avx2
#define HYPER_MPMD_AVX2
#include "kernels_all.inl"
#endif
