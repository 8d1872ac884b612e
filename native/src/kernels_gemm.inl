// y = x · w on one thread, blocked for registers and caches.
//
// x is packed (as fp32) into panels of a few rows, element (row, kk) of a panel of R rows at [kk * R + row]. w is read
// as strips of a few vectors' width. With many rows a strip is packed once and used by every panel; with few rows it is
// used where it lies, so that the weights cross the memory bus once and nothing is copied. Either way an element of y
// is the same sequence of multiply-adds: kk ascending inside a block of kBlockK, blocks added in order. So a row's
// result does not depend on how many rows come with it, nor a column's on its neighbours.

namespace {

#if defined(HYPER_MPMD_AVX512)
constexpr int kMaxRows = 14;    // 14 x 2 sums, 2 vectors of w, 1 of x: 31 of 32 registers
constexpr int kWideRows = 6;    // so few rows leave registers for a strip twice as wide
constexpr int kWidestRows = 2;  // or four times
constexpr int kUnpackedPanels = 4;
#elif defined(HYPER_MPMD_AVX2)
constexpr int kMaxRows = 6;  // 6 x 2 + 2 + 1 of 16
constexpr int kWideRows = 2;
constexpr int kWidestRows = 1;
constexpr int kUnpackedPanels = 2;
#else
constexpr int kMaxRows = 4;
constexpr int kWideRows = 2;
constexpr int kWidestRows = 1;
constexpr int kUnpackedPanels = 2;
#endif
constexpr int kStripVectors = 2;
constexpr int64_t kStrip = kStripVectors * kLanes;
constexpr int64_t kBlockK = 256;  // a packed strip of 256 x 32 floats is 32 KiB
constexpr int64_t kBlockM = kMaxRows * 10;
constexpr int64_t kBlockN =
    512;  // bounds the fp32 sums of a 16-bit product, and keeps a block of y in the second cache
// Up to here w is used where it lies. Measured: a copy pays only when more panels share it, all the more when rows of w
// are a power of two apart, where a strip in place does not stay in the first cache.
constexpr int64_t kUnpackedRows = kUnpackedPanels * kMaxRows;

constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Memory that will be read after the product at hand (the next strip of w), fetched meanwhile: the lines of one strip
// row at each step of the reduction, then `step` bytes on, or `jump` bytes at every eighth step. Without it the weights
// of few rows arrive at a third of the memory's bandwidth.
struct Ahead {
  const char* at;
  int64_t step, jump;
};

// c[R, V vectors] (+)= panel · strip. The strip's row kk starts at w + kk * ldw; all its columns exist.
template <int R, int V, typename T>
inline void multiply(int64_t depth, const float* panel, const T* w, int64_t ldw, float* c, int64_t ldc, bool add,
                     Ahead ahead) {
  constexpr int kLines = V * kLanes * static_cast<int>(sizeof(T)) / 64;
  F sum[R][V] = {};
  for (int64_t kk = 0; kk < depth; ++kk, panel += R, w += ldw) {
#pragma GCC unroll 8
    for (int line = 0; line < (kLines > 0 ? kLines : 1); ++line) __builtin_prefetch(ahead.at + line * 64);
    ahead.at += (kk & 7) == 7 ? ahead.jump : ahead.step;
    F right[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) right[v] = load(w + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      F left = broadcast(panel[r]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* to = c + r * ldc + v * kLanes;
      store(to, add ? load(to) + sum[r][v] : sum[r][v]);
    }
  }
}

// The same for a number of rows known at run time: one compiled loop for each.
template <int V, typename T, int R>
void multiply_rows(int64_t rows, int64_t depth, const float* panel, const T* w, int64_t ldw, float* c, int64_t ldc,
                   bool add, Ahead ahead) {
  if (rows == R) {
    multiply<R, V>(depth, panel, w, ldw, c, ldc, add, ahead);
  } else if constexpr (R > 1) {
    multiply_rows<V, T, R - 1>(rows, depth, panel, w, ldw, c, ldc, add, ahead);
  }
}

// Rows cut into panels as equal as can be: `count` panels, the first `larger` of them one row longer.
struct Panels {
  int64_t count, rows, larger;
  explicit Panels(int64_t m) : count((m + kMaxRows - 1) / kMaxRows), rows(m / count), larger(m % count) {}
  int64_t size(int64_t panel) const { return rows + (panel < larger ? 1 : 0); }
};

inline float widened(float value) { return value; }
inline float widened(uint16_t value) {
  uint32_t bits = static_cast<uint32_t>(value) << 16;
  float result;
  __builtin_memcpy(&result, &bits, sizeof result);
  return result;
}

inline float widened(Half value) { return load_some(&value, 1)[0]; }

#ifdef __SSE2__
inline __m128 load4(const float* from) { return _mm_loadu_ps(from); }
inline __m128 load4(const uint16_t* from) {
  __m128i half = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return _mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), half));
}
#if defined(HYPER_MPMD_AVX512) || defined(HYPER_MPMD_AVX2)
inline __m128 load4(const Half* from) { return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))); }
#else
inline __m128 load4(const Half* from) { return (__m128)load(from); }
#endif
#endif

// to[col * stride + row] = from[row * ld + col]
template <typename T>
inline void transpose(int64_t rows, int64_t cols, const T* from, int64_t ld, float* to, int64_t stride) {
  int64_t row = 0;
#ifdef __SSE2__
  for (; row + 4 <= rows; row += 4) {
    const T* f = from + row * ld;
    int64_t col = 0;
    for (; col + 4 <= cols; col += 4) {
      __m128 a = load4(f + col), b = load4(f + ld + col), c = load4(f + 2 * ld + col), d = load4(f + 3 * ld + col);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      float* t = to + col * stride + row;
      _mm_storeu_ps(t, a);
      _mm_storeu_ps(t + stride, b);
      _mm_storeu_ps(t + 2 * stride, c);
      _mm_storeu_ps(t + 3 * stride, d);
    }
    for (; col < cols; ++col) {
      for (int64_t r = 0; r < 4; ++r) to[col * stride + row + r] = widened(f[r * ld + col]);
    }
  }
#endif
  for (int64_t col = 0; col < cols; ++col) {
    for (int64_t r = row; r < rows; ++r) to[col * stride + r] = widened(from[r * ld + col]);
  }
}

// A panel of x: rows [row, row + rows) and columns [kk, kk + depth) of the untransposed x.
template <typename T>
void pack_panel(const GemmArgs& a, int64_t row, int64_t rows, int64_t kk, int64_t depth, float* to) {
  const T* x = static_cast<const T*>(a.x);
  if (!a.transpose_x) {
    transpose(rows, depth, x + row * a.ldx + kk, a.ldx, to, rows);
    return;
  }
  for (int64_t i = 0; i < depth; ++i) {
    const T* from = x + (kk + i) * a.ldx + row;
    for (int64_t r = 0; r < rows; ++r) to[i * rows + r] = widened(from[r]);
  }
}

// A strip of w, kStrip wide, columns beyond `cols` zero.
template <typename T>
void pack_strip(const GemmArgs& a, int64_t kk, int64_t depth, int64_t col, int64_t cols, float* to) {
  const T* w = static_cast<const T*>(a.w);
  if (a.transpose_w) {
    transpose(cols, depth, w + col * a.ldw + kk, a.ldw, to, kStrip);
    for (int64_t i = 0; cols < kStrip && i < depth; ++i) {
      for (int64_t c = cols; c < kStrip; ++c) to[i * kStrip + c] = 0.0f;
    }
    return;
  }
  const T* from = w + kk * a.ldw + col;
  for (int64_t i = 0; i < depth; ++i, from += a.ldw, to += kStrip) {
    for (int v = 0; v < kStripVectors; ++v) {
      int64_t rest = cols - v * kLanes;
      F value = rest >= kLanes ? load(from + v * kLanes) : rest > 0 ? load_some(from + v * kLanes, rest) : zero();
      store(to + v * kLanes, value);
    }
  }
}

// Where the pieces of the scratch start, in floats.
struct Layout {
  int64_t strip, sums, total;
  Layout(bool half, int64_t m, int64_t n, int64_t k) {
    int64_t mb = least(m, kBlockM), nb = least(n, kBlockN), kb = least(k, kBlockK);
    strip = round_up(mb * k, 16);
    sums = strip + kb * kStrip;
    total = sums + (half ? mb * nb : 0);
  }
};

constexpr bool packs(int64_t m, bool transpose_w) { return transpose_w || m > kUnpackedRows; }

size_t gemm_scratch_bytes(bool half, int64_t m, int64_t n, int64_t k) {
  return static_cast<size_t>(Layout(half, m, n, k).total) * sizeof(float);
}

// One strip against every panel of the block of rows; the first panel's pass also fetches `ahead`.
template <int V, int R, typename T>
void strip_product(const Panels& panels, int64_t depth, const float* x, const T* w, int64_t ldw, float* c, int64_t ldc,
                   int64_t cols, bool add, Ahead ahead) {
  for (int64_t p = 0; p < panels.count; ++p) {
    int64_t rows = panels.size(p);
    if (cols >= V * kLanes) {
      multiply_rows<V, T, R>(rows, depth, x, w, ldw, c, ldc, add, ahead);
    } else {  // the last columns: by way of a full tile
      alignas(64) float tile[R * V * kLanes];
      multiply_rows<V, T, R>(rows, depth, x, w, ldw, tile, V * kLanes, false, ahead);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < cols; ++j) {
          float value = tile[r * V * kLanes + j];
          c[r * ldc + j] = add ? c[r * ldc + j] + value : value;
        }
      }
    }
    ahead = {reinterpret_cast<const char*>(x), 0, 0};
    x += rows * depth;
    c += rows * ldc;
  }
}

// Where a block's strip of w begins, and how to walk it.
template <typename T>
Ahead ahead_of(const GemmArgs& a, int64_t kk, int64_t col) {
  constexpr int64_t kElement = sizeof(T);
  const char* w = static_cast<const char*>(a.w);
  if (!a.transpose_w) return {w + (kk * a.ldw + col) * kElement, a.ldw * kElement, a.ldw * kElement};
  constexpr int64_t kStep = kBlockK * kElement / 8;
  return {w + (col * a.ldw + kk) * kElement, kStep, a.ldw * kElement - 7 * kStep};
}

// Columns [jc, jc + nb) and depth [kk, kk + depth) of w against a packed block of rows.
template <typename T>
void block_product(const GemmArgs& a, const Panels& panels, const float* x, int64_t kk, int64_t depth, int64_t jc,
                   int64_t nb, float* strip, float* c, int64_t ldc, bool packed) {
  const bool add = kk > 0;
  const T* w = packed ? nullptr : static_cast<const T*>(a.w) + kk * a.ldw + jc;
  const int64_t wide = packed || panels.count > 1   ? kStrip
                       : panels.rows <= kWidestRows ? 4 * kStrip
                       : panels.rows <= kWideRows   ? 2 * kStrip
                                                    : kStrip;
  for (int64_t j = 0, cols; j < nb; j += cols) {
    cols = least(nb - j >= wide ? wide : kStrip, nb - j);
    const Ahead ahead = j + cols < nb      ? ahead_of<T>(a, kk, jc + j + cols)
                        : kk + depth < a.k ? ahead_of<T>(a, kk + depth, jc)
                                           : ahead_of<T>(a, kk, jc);
    if (packed || cols < kStrip) {
      pack_strip<T>(a, kk, depth, jc + j, cols, strip);
      strip_product<kStripVectors, kMaxRows>(panels, depth, x, static_cast<const float*>(strip), kStrip, c + j, ldc,
                                             cols, add, ahead);
    } else if (cols == kStrip) {
      strip_product<kStripVectors, kMaxRows>(panels, depth, x, w + j, a.ldw, c + j, ldc, cols, add, ahead);
    } else if (cols == 2 * kStrip) {
      strip_product<2 * kStripVectors, kWideRows>(panels, depth, x, w + j, a.ldw, c + j, ldc, cols, add, ahead);
    } else {
      strip_product<4 * kStripVectors, kWidestRows>(panels, depth, x, w + j, a.ldw, c + j, ldc, cols, add, ahead);
    }
  }
}

// All of it: blocks of rows, their x packed whole; in each, blocks of columns; in each, blocks of the reduction in
// order.
template <typename T>
void gemm(const GemmArgs& a) {
  const bool packed = packs(a.m, a.transpose_w);
  const Layout layout(sizeof(T) == 2, a.m, a.n, a.k);
  const int64_t blocks = (a.m + kBlockM - 1) / kBlockM;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t row = a.m * block / blocks, mb = a.m * (block + 1) / blocks - row;
    const Panels panels(mb);
    float* x = a.scratch;
    for (int64_t kk = 0; kk < a.k; kk += kBlockK) {
      int64_t depth = least(kBlockK, a.k - kk);
      for (int64_t p = 0, r = 0; p < panels.count; r += panels.size(p), ++p) {
        pack_panel<T>(a, row + r, panels.size(p), kk, depth, x + mb * kk + r * depth);
      }
    }
    for (int64_t jc = 0; jc < a.n; jc += kBlockN) {
      const int64_t nb = least(kBlockN, a.n - jc);
      T* y = static_cast<T*>(a.y) + row * a.ldy + jc;
      float* c;
      int64_t ldc;
      if constexpr (sizeof(T) == 2) {
        c = a.scratch + layout.sums;
        ldc = nb;
      } else {
        c = y;
        ldc = a.ldy;
      }
      for (int64_t kk = 0; kk < a.k; kk += kBlockK) {
        block_product<T>(a, panels, x + mb * kk, kk, least(kBlockK, a.k - kk), jc, nb, a.scratch + layout.strip, c, ldc,
                         packed);
      }
      if constexpr (sizeof(T) == 2) convert(mb, nb, static_cast<const float*>(c), ldc, y, a.ldy);
    }
  }
}

}  // namespace
