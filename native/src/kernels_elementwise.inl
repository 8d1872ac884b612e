// SwiGLU, unpermute and conversions: one pass over memory, arithmetic in fp32, one rounding at the end.

namespace {

// g / (1 + exp(-g)) as g * [1 or t] / (1 + t) with t = exp(-|g|): nothing overflows and small results keep their
// digits.
inline F silu(F g) {
  const Exponential t = exp_nonpositive((F)((U)g | 0x80000000u));
  const F scaled = g * t.first * t.mantissa * t.second;
  return (g >= 0.0f ? g : scaled) / (t.mantissa * t.first * t.second + 1.0f);
}

// NaN stays NaN, and an infinite limit changes nothing.
inline F at_most(F x, F limit) { return x > limit ? limit : x; }
inline F within(F x, F limit) { return at_most(x < -limit ? -limit : x, limit); }

template <typename T>
void swiglu(int64_t rows, int64_t cols, const T* gate, int64_t ldg, const T* up, int64_t ldu, T* out, int64_t ldo,
            float most) {
  const F limit = broadcast(most);
  const auto at = [limit](F g, F u) { return silu(at_most(g, limit)) * within(u, limit); };
  for (int64_t row = 0; row < rows; ++row, gate += ldg, up += ldu, out += ldo) {
    int64_t col = 0;
    for (; col + kLanes <= cols; col += kLanes) store(out + col, at(load(gate + col), load(up + col)));
    if (int64_t rest = cols - col; rest > 0) {
      store_some(out + col, at(load_some(gate + col, rest), load_some(up + col, rest)), rest);
    }
  }
}

template <typename T>
void weighted_swiglu(int64_t rows, int64_t cols, const T* gate, int64_t ldg, const T* up, int64_t ldu,
                     const float* weights, T* out, int64_t ldo, float most) {
  const F limit = broadcast(most);
  const auto at = [limit](F weight, F g, F u) { return weight * (silu(at_most(g, limit)) * within(u, limit)); };
  for (int64_t row = 0; row < rows; ++row, gate += ldg, up += ldu, out += ldo) {
    const F weight = broadcast(weights[row]);
    int64_t col = 0;
    for (; col + kLanes <= cols; col += kLanes) store(out + col, at(weight, load(gate + col), load(up + col)));
    if (int64_t rest = cols - col; rest > 0) {
      store_some(out + col, at(weight, load_some(gate + col, rest), load_some(up + col, rest)), rest);
    }
  }
}

struct Gradients {
  F gate, up, product;
};

// Nothing flows back to what was clamped.
inline Gradients swiglu_grad_at(F raw_gate, F raw_up, F grad, F weight, F limit) {
  const F gate = at_most(raw_gate, limit), up = within(raw_up, limit);
  const Exponential e = exp_nonpositive((F)((U)gate | 0x80000000u));
  const F t = e.mantissa * e.first * e.second, whole = zero() + 1.0f;
  const F sigmoid = (gate >= 0.0f ? whole : t) / (t + 1.0f), rest = (gate >= 0.0f ? t : whole) / (t + 1.0f);
  const F act = silu(gate), weighted = weight * grad;
  const F d_gate = weighted * up * fma(act, rest, sigmoid), d_up = weighted * act;
  return {raw_gate > limit ? zero() : d_gate, raw_up > limit || raw_up < -limit ? zero() : d_up, act * up * grad};
}

template <typename T>
void swiglu_grad(const SwiGLUGradArgs& a) {
  const T *gate = static_cast<const T*>(a.gate), *up = static_cast<const T*>(a.up),
          *grad = static_cast<const T*>(a.grad);
  T *d_gate = static_cast<T*>(a.d_gate), *d_up = static_cast<T*>(a.d_up);
  const F limit = broadcast(a.limit);
  for (int64_t row = 0; row < a.rows; ++row) {
    const F weight = broadcast(a.weights[row]);
    F sum = zero();
    int64_t col = 0;
    for (; col + kLanes <= a.cols; col += kLanes) {
      const Gradients d = swiglu_grad_at(load(gate + col), load(up + col), load(grad + col), weight, limit);
      store(d_gate + col, d.gate);
      store(d_up + col, d.up);
      sum += d.product;
    }
    // What load_some leaves out it fills with zeros, whose product is zero.
    if (int64_t rest = a.cols - col; rest > 0) {
      const Gradients d = swiglu_grad_at(load_some(gate + col, rest), load_some(up + col, rest),
                                         load_some(grad + col, rest), weight, limit);
      store_some(d_gate + col, d.gate, rest);
      store_some(d_up + col, d.up, rest);
      sum += d.product;
    }
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
    a.dots[row] = total;
    gate += a.ldg, up += a.ldu, grad += a.ldd, d_gate += a.lddg, d_up += a.lddu;
  }
}

template <typename T>
void unpermute(int64_t tokens, int64_t k, int64_t cols, const T* y, int64_t ldy, const int32_t* index,
               const float* weights, T* out, int64_t ldo) {
  constexpr int kWide = 4;  // vectors in flight: independent sums hide the latency of each addition
  constexpr int kLine = 64 / sizeof(T);
  for (int64_t token = 0; token < tokens; ++token, index += k, out += ldo) {
    const float* mine = weights ? weights + token * k : nullptr;
    // Rows lie anywhere, so the hardware cannot guess the next token's: they are fetched while this one's are added.
    const int32_t* next = token + 1 < tokens ? index + k : index;
    int64_t col = 0;
    for (; col + kWide * kLanes <= cols; col += kWide * kLanes) {
      F sum[kWide] = {};
      for (int64_t j = 0; j < k; ++j) {
        const T* from = y + index[j] * ldy + col;
        const T* ahead = y + next[j] * ldy + col;
        for (int c = 0; c < kWide * kLanes; c += kLine) __builtin_prefetch(ahead + c);
        F weight = broadcast(mine ? mine[j] : 1.0f);
        for (int v = 0; v < kWide; ++v) sum[v] = fma(weight, load(from + v * kLanes), sum[v]);
      }
      for (int v = 0; v < kWide; ++v) store(out + col + v * kLanes, sum[v]);
    }
    for (; col < cols; col += kLanes) {
      int64_t rest = cols - col;
      F sum = zero();
      for (int64_t j = 0; j < k; ++j) {
        const T* from = y + index[j] * ldy + col;
        sum = fma(broadcast(mine ? mine[j] : 1.0f), rest < kLanes ? load_some(from, rest) : load(from), sum);
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
