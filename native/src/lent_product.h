// The product that torch lends, on fp32 views; kernels.cpp converts other types around it.
#pragma once

#include <cstdint>

namespace hyper_mpmd::kernels {

// y[m, n] = x · w. Throws std::runtime_error when nothing is lent or torch reports an error.
void lent_product(int64_t m, int64_t n, int64_t k, const float* x, int64_t ldx, bool transpose_x, const float* w,
                  int64_t ldw, bool transpose_w, float* y, int64_t ldy);

}  // namespace hyper_mpmd::kernels
