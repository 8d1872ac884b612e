// Vectors of the instruction set being compiled for, on the compiler's vector extensions: + - * / ?: and comparisons
// work on them everywhere, so that only what has no operator is written per set.

namespace {

#if defined(HYPER_MPMD_AVX512)
constexpr int kLanes = 16;
#elif defined(HYPER_MPMD_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef float LooseF __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));  // in memory, not aligned
#ifndef __SSE2__
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));
typedef uint16_t LooseH __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
#endif

inline F zero() { return F{}; }
inline F broadcast(float value) { return value - F{}; }

// a * b + c: fused where the instruction set has it, else rounded twice.
inline F fma(F a, F b, F c) {
#if defined(HYPER_MPMD_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(HYPER_MPMD_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline F load(const float* from) { return *reinterpret_cast<const LooseF*>(from); }
inline void store(float* to, F value) { *reinterpret_cast<LooseF*>(to) = value; }

// 16-bit lanes to the upper halves of 32-bit ones and back. The compiler's own conversion between vectors of unlike
// sizes goes by way of halves and costs twice as much.
inline U upper_halves(const uint16_t* from) {
#if defined(HYPER_MPMD_AVX512)
  return (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))) << 16;
#elif defined(HYPER_MPMD_AVX2)
  return (U)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))) << 16;
#elif defined(__SSE2__)
  return (U)_mm_unpacklo_epi16(_mm_setzero_si128(), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
  return __builtin_convertvector((H) * reinterpret_cast<const LooseH*>(from), U) << 16;
#endif
}

inline void store_upper_halves(uint16_t* to, U bits) {
#if defined(HYPER_MPMD_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16((__m512i)(bits >> 16)));
#elif defined(HYPER_MPMD_AVX2)
  // Arithmetic shift, so that signed saturation changes nothing; the pack works on 128-bit halves, which the
  // permutation joins.
  const __m256i halves = (__m256i)((I)bits >> 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(halves, halves), 0x8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
#elif defined(__SSE2__)
  const __m128i halves = (__m128i)((I)bits >> 16);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi32(halves, halves));
#else
  *reinterpret_cast<LooseH*>(to) = __builtin_convertvector(bits >> 16, H);
#endif
}

// bf16 is the upper half of an fp32, so widening is exact.
inline F load(const uint16_t* from) { return (F)upper_halves(from); }

// Rounded to nearest even; a NaN keeps its sign and upper payload and becomes quiet, so that it never rounds to
// infinity.
inline void store(uint16_t* to, F value) {
  const U bits = (U)value;
  const U rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  store_upper_halves(to, value == value ? rounded : bits | 0x400000u);
}

#if !defined(HYPER_MPMD_AVX512) && !defined(HYPER_MPMD_AVX2)
// What the instructions of the other sets do with a binary16, lane by lane. A binary16 and an fp32 differ by 112 in the
// bias of their exponents and by 13 bits of mantissa.
inline F float_of_half(U half) {
  const U magnitude = half & 0x7fffu;
  // Shifted into place, the number is too small by 2^112; the product is exact, of subnormal numbers too.
  const F finite = (F)(magnitude << 13) * 0x1p112f;
  const U special = 0x7f800000u | (magnitude << 13) | (magnitude > 0x7c00u ? U{} + 0x400000u : U{});
  return (F)((magnitude >= 0x7c00u ? special : (U)finite) | (half & 0x8000u) << 16);
}

// Rounded to nearest even.
inline U half_of_float(F value) {
  const U bits = (U)value, magnitude = bits & 0x7fffffffu;
  // The sum has the result's last bit in its own last place, and so rounds as the result must.
  const U subnormal = (U)((F)magnitude + 0.5f) - 0x3f000000u;
  const U normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const U nan = 0x7e00u | (magnitude >> 13 & 0x1ffu);
  const U finite = magnitude < 0x38800000u ? subnormal : normal;
  const U result = magnitude > 0x7f800000u ? nan : magnitude >= 0x47800000u ? U{} + 0x7c00u : finite;
  return result | (bits >> 16 & 0x8000u);
}
#endif

inline F load(const Half* from) {
#if defined(HYPER_MPMD_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(HYPER_MPMD_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  return float_of_half(upper_halves(&from->bits) >> 16);
#endif
}

inline void store(Half* to, F value) {
#if defined(HYPER_MPMD_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(HYPER_MPMD_AVX2)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
#else
  store_upper_halves(&to->bits, half_of_float(value) << 16);
#endif
}

// The first `count` < kLanes elements only.
template <typename T>
inline F load_some(const T* from, int64_t count) {
  T lanes[kLanes] = {};
  __builtin_memcpy(lanes, from, static_cast<size_t>(count) * sizeof(T));
  return load(lanes);
}

template <typename T>
inline void store_some(T* to, F value, int64_t count) {
  T lanes[kLanes];
  store(lanes, value);
  __builtin_memcpy(to, lanes, static_cast<size_t>(count) * sizeof(T));
}

// exp of a number <= 0 as mantissa * first * second, both of these normal powers of two: whoever multiplies a factor in
// before the last of them rounds a subnormal product once. The product is within 1 ulp with fused multiply-add and 2
// without. NaN stays NaN; below -110, where even 100 exp(x) vanishes, the mantissa is 0.
struct Exponential {
  F mantissa, first, second;
};

inline Exponential exp_nonpositive(F x) {
  // x = n ln 2 + r, |r| <= ln 2 / 2; exp(r) = 1 + r + r^2 q(r), q a minimax fit with relative error 2^-34.
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const F lowest = broadcast(-110.0f);
  const F bounded = x < lowest ? lowest : x;
  const F shifted = fma(bounded, broadcast(1.44269504088896341f), broadcast(kToInteger));
  const F n = shifted - kToInteger;
  // ln 2 in two parts, the first with so few bits that n times it is exact.
  F r = fma(n, broadcast(-0.693359375f), bounded);
  r = fma(n, broadcast(2.12194440054690583e-4f), r);
  F q = broadcast(1.9790262834e-04f);
  q = fma(q, r, broadcast(1.3944760996e-03f));
  q = fma(q, r, broadcast(8.3334976525e-03f));
  q = fma(q, r, broadcast(4.1666293595e-02f));
  q = fma(q, r, broadcast(1.6666665865e-01f));
  q = fma(q, r, broadcast(5.0000000681e-01f));
  const F mantissa = fma(q, r * r, r) + 1.0f;
  const I exponent = (I)((U)shifted - (U)broadcast(kToInteger));
  const I half = exponent >> 1;
  return {x < lowest ? zero() : mantissa, (F)((U)(half + 127) << 23), (F)((U)(exponent - half + 127) << 23)};
}

}  // namespace
