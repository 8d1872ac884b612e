// The kernels on buffers of exactly the size they may touch (for AddressSanitizer), from several threads at once (for
// ThreadSanitizer), under every instruction set of the machine. Accuracy is tested from Python.
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "check.h"
#include "hyper_mpmd/kernels.h"
#include "hyper_mpmd/lent_gemm.h"

using namespace hyper_mpmd;
using namespace hyper_mpmd::kernels;

namespace {

// A matrix whose last row ends where its memory ends, so that reading or writing on is an error the sanitizer sees.
template <typename T>
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, int64_t ld, T value = T{})
      : rows_(rows), ld_(ld), store_(rows == 0 ? 0 : static_cast<size_t>((rows - 1) * ld + cols), value) {}
  T& at(int64_t row, int64_t col) { return store_[static_cast<size_t>(row * ld_ + col)]; }
  T* data() { return store_.data(); }
  int64_t ld() const { return ld_; }
  int64_t rows() const { return rows_; }
  const std::vector<T>& store() const { return store_; }

 private:
  int64_t rows_, ld_;
  std::vector<T> store_;
};

float widened(uint16_t value) {
  uint32_t bits = uint32_t{value} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
float widened(float value) { return value; }

// A binary16 of normal size or zero: all that these tests make.
struct Half {
  uint16_t bits;
};
float widened(Half value) {
  const int exponent = value.bits >> 10 & 31;
  const float magnitude = std::ldexp(static_cast<float>((value.bits & 1023) | 1024), exponent - 25);
  return exponent == 0 ? 0.0f : value.bits >> 15 ? -magnitude : magnitude;
}

// Small integers: their products and sums are exact in fp32, so results can be compared with ==.
template <typename T>
T small(int value) {
  float exact = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &exact, sizeof bits);
  if constexpr (std::is_same_v<T, float>) {
    return exact;
  } else if constexpr (std::is_same_v<T, Half>) {
    const uint32_t magnitude = bits & 0x7fffffffu;  // 112 between the biases, 13 bits of mantissa less
    return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | (value == 0 ? 0 : (magnitude - (112u << 23)) >> 13))};
  } else {
    return static_cast<T>(bits >> 16);
  }
}

template <typename T>
constexpr DType kDType = std::is_same_v<T, float>  ? DType::kFloat32
                         : std::is_same_v<T, Half> ? DType::kFloat16
                                                   : DType::kBFloat16;

template <typename T>
void check_gemm(int64_t m, int64_t n, int64_t k, bool transpose_x, bool transpose_w) {
  std::mt19937 random(static_cast<unsigned>(m * 1000003 + n * 1009 + k));
  const int64_t x_rows = transpose_x ? k : m, x_cols = transpose_x ? m : k;
  const int64_t w_rows = transpose_w ? n : k, w_cols = transpose_w ? k : n;
  Matrix<T> x(x_rows, x_cols, x_cols + 1), w(w_rows, w_cols, w_cols + 3), y(m, n, n + 2, small<T>(77));
  for (int64_t r = 0; r < x_rows; ++r) {
    for (int64_t c = 0; c < x_cols; ++c) x.at(r, c) = small<T>(static_cast<int>(random() % 5) - 2);
  }
  // One non-zero in each column of w keeps every result small enough to be a bf16 integer.
  for (int64_t c = 0; c < n && k > 0; ++c) {
    const int64_t r = static_cast<int64_t>(random() % static_cast<unsigned>(k));
    (transpose_w ? w.at(c, r) : w.at(r, c)) = small<T>(1 + static_cast<int>(random() % 7));
  }
  Scratch scratch;
  gemm(kDType<T>, m, n, k, x.data(), x.ld(), w.data(), w.ld(), y.data(), y.ld(), scratch, transpose_x, transpose_w);
  CHECK(scratch.capacity() <= gemm_scratch_bytes(kDType<T>, m, n, k));
  int wrong = 0;
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      float expected = 0;
      for (int64_t i = 0; i < k; ++i) {
        expected += widened(transpose_x ? x.at(i, r) : x.at(r, i)) * widened(transpose_w ? w.at(c, i) : w.at(i, c));
      }
      wrong += widened(y.at(r, c)) != expected;
    }
    for (int64_t c = n; c < y.ld() && r + 1 < m; ++c) wrong += widened(y.at(r, c)) != 77;
  }
  CHECK_EQ(wrong, 0);
}

void gemms_of_every_shape() {
  for (int64_t m : {0, 1, 2, 3, 5, 6, 7, 14, 15, 29}) {
    for (int64_t n : {1, 7, 31, 33, 129}) {
      for (int64_t k : {0, 1, 5, 37}) {
        check_gemm<float>(m, n, k, false, false);
        check_gemm<uint16_t>(m, n, k, true, true);
        check_gemm<Half>(m, n, k, false, true);
      }
    }
  }
  for (bool transpose : {false, true}) {
    check_gemm<float>(3, 530, 258, transpose, !transpose);
    check_gemm<float>(61, 65, 258, transpose, transpose);
    check_gemm<uint16_t>(61, 65, 258, transpose, !transpose);
    check_gemm<uint16_t>(142, 515, 20, transpose, transpose);
    check_gemm<Half>(61, 65, 258, transpose, transpose);
  }
}

template <typename T>
void elementwise_of_every_width() {
  for (int64_t cols = 0; cols < 70; ++cols) {
    Matrix<T> gate(3, cols, cols + 1, small<T>(2)), up(3, cols, cols + 2, small<T>(3)), out(3, cols, cols);
    swiglu(kDType<T>, 3, cols, gate.data(), gate.ld(), up.data(), up.ld(), out.data(), out.ld());
    for (int64_t c = 0; c < cols; ++c) CHECK(std::abs(widened(out.at(2, c)) - 5.2847825f) < 0.02f);

    // With g = 2, u = 3, weight 0.5 and gradient 1: silu(2) = 1.7615942, its slope 1.0907843.
    const float halves[3] = {0.5f, 0.5f, 0.5f};
    float dots[3];
    Matrix<T> ones(3, cols, cols, small<T>(1)), d_gate(3, cols, cols), d_up(3, cols, cols + 3);
    weighted_swiglu(kDType<T>, 3, cols, gate.data(), gate.ld(), up.data(), up.ld(), halves, out.data(), out.ld());
    swiglu_grad(kDType<T>, 3, cols, gate.data(), gate.ld(), up.data(), up.ld(), ones.data(), ones.ld(), halves,
                d_gate.data(), d_gate.ld(), d_up.data(), d_up.ld(), dots);
    for (int64_t c = 0; c < cols; ++c) {
      CHECK(std::abs(widened(out.at(2, c)) - 2.6423913f) < 0.01f);
      CHECK(std::abs(widened(d_gate.at(2, c)) - 1.6361765f) < 0.01f);
      CHECK(std::abs(widened(d_up.at(2, c)) - 0.8807971f) < 0.005f);
    }
    CHECK(std::abs(dots[2] - 5.2847825f * static_cast<float>(cols)) < 1e-3f);

    const int32_t index[4] = {2, 0, 1, 1};
    const float weights[4] = {0.5f, 2.0f, 1.0f, -1.0f};
    Matrix<T> sums(2, cols, cols);
    CHECK_EQ(unpermute(kDType<T>, 2, 2, cols, up.data(), up.ld(), 3, index, weights, sums.data(), sums.ld()),
             kIndexesGood);
    for (int64_t c = 0; c < cols; ++c) CHECK(widened(sums.at(0, c)) == 7.5f && widened(sums.at(1, c)) == 0.0f);

    CHECK_EQ(unpermute(kDType<T>, 2, 2, cols, up.data(), up.ld(), 3, index, nullptr, sums.data(), sums.ld()),
             kIndexesGood);
    for (int64_t c = 0; c < cols; ++c) CHECK(widened(sums.at(0, c)) == 6.0f && widened(sums.at(1, c)) == 6.0f);

    Matrix<float> wide(3, cols, cols);
    Matrix<uint16_t> narrow(3, cols, cols);
    Matrix<Half> half(3, cols, cols);
    convert(3, cols, kDType<T>, up.data(), up.ld(), DType::kFloat32, wide.data(), wide.ld());
    convert(3, cols, DType::kFloat32, wide.data(), wide.ld(), DType::kBFloat16, narrow.data(), narrow.ld());
    convert(3, cols, DType::kFloat32, wide.data(), wide.ld(), DType::kFloat16, half.data(), half.ld());
    for (int64_t c = 0; c < cols; ++c) CHECK(widened(half.at(2, c)) == 3.0f);
    for (int64_t c = 0; c < cols; ++c) CHECK(wide.at(2, c) == 3.0f && widened(narrow.at(2, c)) == 3.0f);
  }
}

void moving_rows() {
  Matrix<int64_t> x(3, 5, 6), out(4, 5, 7, -1);
  for (int64_t r = 0; r < 3; ++r) {
    for (int64_t c = 0; c < 5; ++c) x.at(r, c) = 10 * r + c;
  }
  const int32_t index[4] = {2, 2, 0, 1};
  CHECK_EQ(gather_rows(DType::kInt64, 4, 5, x.data(), x.ld(), 3, index, out.data(), out.ld()), kIndexesGood);
  for (int64_t r = 0; r < 4; ++r) CHECK_EQ(out.at(r, 4), 10 * index[r] + 4);
  const std::vector<int64_t> before = out.store();
  const int32_t bad[4] = {0, -1, 3, 1};
  CHECK_EQ(gather_rows(DType::kInt64, 4, 5, x.data(), x.ld(), 3, bad, out.data(), out.ld()), 1);
  CHECK(out.store() == before);

  Matrix<int64_t> dense(3, 5, 5), again(3, 5, 5);
  copy_rows(DType::kInt64, 3, 5, x.data(), x.ld(), dense.data(), dense.ld());
  copy_rows(DType::kInt64, 3, 5, dense.data(), dense.ld(), again.data(), again.ld());
  CHECK(again.store() == dense.store());
  CHECK_EQ(again.at(2, 4), 24);
}

void every_thread_gets_the_same_bits() {
  constexpr int64_t kM = 40, kN = 70, kK = 300;
  std::vector<float> x(kM * kK), w(kK * kN);
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (float& value : x) value = normal(random);
  for (float& value : w) value = normal(random);
  std::vector<std::vector<float>> results(3, std::vector<float>(kM * kN));
  std::vector<std::thread> threads;
  for (std::vector<float>& y : results) {
    threads.emplace_back([&] {
      lent_gemm_thread_init();
      Scratch scratch;
      gemm(DType::kFloat32, kM, kN, kK, x.data(), kK, w.data(), kN, y.data(), kN, scratch);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(results[0] == results[1]);
  CHECK(results[0] == results[2]);
}

void scratch_grows_and_stays_aligned() {
  Scratch scratch;
  CHECK_EQ(scratch.capacity(), size_t{0});
  for (size_t bytes : {size_t{1}, size_t{1000}, size_t{10}}) {
    CHECK_EQ(reinterpret_cast<uintptr_t>(scratch.take(bytes)) % kAlignment, uintptr_t{0});
  }
  CHECK_EQ(scratch.capacity(), size_t{1000});
}

void nothing_lent_is_refused() {
  float one = 1.0f, y = 0.0f;
  Scratch scratch;
  CHECK(!gemm_is_lent());
  const LentGemm incomplete;
  CHECK(!lend_gemm(&incomplete));
  CHECK_THROWS(gemm_by(GemmWay::kLent, DType::kFloat32, 1, 1, 1, &one, 1, &one, 1, &y, 1, scratch), std::runtime_error);
}

}  // namespace

int main() {
  const Isa best = isa();
  for (Isa candidate : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (!select_isa(candidate)) continue;
    CHECK(isa() == candidate);
    std::cout << isa_name(candidate) << std::endl;
    gemms_of_every_shape();
    elementwise_of_every_width<float>();
    elementwise_of_every_width<uint16_t>();
    elementwise_of_every_width<Half>();
    every_thread_gets_the_same_bits();
  }
  CHECK(select_isa(best));
  moving_rows();
  scratch_grows_and_stays_aligned();
  nothing_lent_is_refused();
  return check::status();
}
