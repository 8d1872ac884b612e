// SwiGLU, unpermute and conversions: one pass over memory, arithmetic in fp32, one rounding at the end.

namespace {

// g / (1 + exp(-g)) as g * [1 or t] / (1 + t) with t = exp(-|g|): nothing overflows and small results keep their
// digits.
inline F silu(F g) {
  const Exponential t = exp_nonpositive((F)((U)g | 0x80000000u));
  const F scaled = g * t.first * t.mantissa * t.second;
  return (g >= 0.0f ? g : scaled) / (t.mantissa * t.first * t.second + 1.0f);
}

template <typename T>
void swiglu(int64_t rows, int64_t cols, const T* gate, int64_t ldg, const T* up, int64_t ldu, T* out, int64_t ldo) {
  for (int64_t row = 0; row < rows; ++row, gate += ldg, up += ldu, out += ldo) {
    int64_t col = 0;
    for (; col + kLanes <= cols; col += kLanes) store(out + col, silu(load(gate + col)) * load(up + col));
    if (int64_t rest = cols - col; rest > 0) {
      store_some(out + col, silu(load_some(gate + col, rest)) * load_some(up + col, rest), rest);
    }
  }
}

template <typename T>
void unpermute(int64_t tokens, int64_t k, int64_t cols, const T* y, int64_t ldy, const int32_t* index,
               const float* weights, T* out, int64_t ldo) {
  constexpr int kWide = 4;  // vectors in flight: independent sums hide the latency of each addition
  constexpr int kLine = 64 / sizeof(T);
  for (int64_t token = 0; token < tokens; ++token, index += k, weights += k, out += ldo) {
    // Rows lie anywhere, so the hardware cannot guess the next token's: they are fetched while this one's are added.
    const int32_t* next = token + 1 < tokens ? index + k : index;
    int64_t col = 0;
    for (; col + kWide * kLanes <= cols; col += kWide * kLanes) {
      F sum[kWide] = {};
      for (int64_t j = 0; j < k; ++j) {
        const T* from = y + index[j] * ldy + col;
        const T* ahead = y + next[j] * ldy + col;
        for (int c = 0; c < kWide * kLanes; c += kLine) __builtin_prefetch(ahead + c);
        F weight = broadcast(weights[j]);
        for (int v = 0; v < kWide; ++v) sum[v] = fma(weight, load(from + v * kLanes), sum[v]);
      }
      for (int v = 0; v < kWide; ++v) store(out + col + v * kLanes, sum[v]);
    }
    for (; col < cols; col += kLanes) {
      int64_t rest = cols - col;
      F sum = zero();
      for (int64_t j = 0; j < k; ++j) {
        const T* from = y + index[j] * ldy + col;
        sum = fma(broadcast(weights[j]), rest < kLanes ? load_some(from, rest) : load(from), sum);
      }
      if (rest < kLanes) {
        store_some(out + col, sum, rest);
      } else {
        store(out + col, sum);
      }
    }
  }
}

template <typename From, typename To>
void convert(int64_t rows, int64_t cols, const From* x, int64_t ldx, To* out, int64_t ldo) {
  for (int64_t row = 0; row < rows; ++row, x += ldx, out += ldo) {
    int64_t col = 0;
    for (; col + kLanes <= cols; col += kLanes) store(out + col, load(x + col));
    if (int64_t rest = cols - col; rest > 0) store_some(out + col, load_some(x + col, rest), rest);
  }
}

}  // namespace
