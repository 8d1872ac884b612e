// The kernels for any processor.
#define HYPER_MPMD_ISA baseline
#include "kernels_all.inl"
