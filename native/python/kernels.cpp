// hyper_mpmd._native.kernels: the kernels on raw addresses, for the tests, the benchmarks and the engine's set-up.
// Whoever calls keeps the memory alive and the sizes true, as with ctypes.
#include "hyper_mpmd/kernels.h"

#include <nanobind/nanobind.h>

#include "bind.h"
#include "hyper_mpmd/lent_gemm.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace hyper_mpmd;

namespace {

template <typename T = void>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

template <typename Function>
Function function_at(uintptr_t address) {
  return reinterpret_cast<Function>(address);
}

kernels::Scratch& scratch() {
  thread_local kernels::Scratch mine;
  return mine;
}

bool lend_gemm(uintptr_t create_tensor_from_blob, uintptr_t delete_tensor, uintptr_t mm_out, uintptr_t get_num_threads,
               uintptr_t omp_set_num_threads, uintptr_t mkl_set_num_threads_local) {
  using kernels::LentGemm;
  LentGemm gemm;
  gemm.create_tensor_from_blob = function_at<decltype(LentGemm::create_tensor_from_blob)>(create_tensor_from_blob);
  gemm.delete_tensor = function_at<decltype(LentGemm::delete_tensor)>(delete_tensor);
  gemm.mm_out = function_at<decltype(LentGemm::mm_out)>(mm_out);
  gemm.get_num_threads = function_at<decltype(LentGemm::get_num_threads)>(get_num_threads);
  gemm.omp_set_num_threads = function_at<decltype(LentGemm::omp_set_num_threads)>(omp_set_num_threads);
  gemm.mkl_set_num_threads_local =
      function_at<decltype(LentGemm::mkl_set_num_threads_local)>(mkl_set_num_threads_local);
  return kernels::lend_gemm(&gemm);
}

}  // namespace

void hyper_mpmd::bind_kernels(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("kernels", "CPU kernels on strided 2-D views, by address");
  using NoGil = nb::call_guard<nb::gil_scoped_release>;

  nb::enum_<DType>(m, "DType")
      .value("float32", DType::kFloat32)
      .value("bfloat16", DType::kBFloat16)
      .value("int32", DType::kInt32)
      .value("int64", DType::kInt64)
      .value("float16", DType::kFloat16);
  nb::enum_<kernels::Isa>(m, "Isa")
      .value("baseline", kernels::Isa::kBaseline)
      .value("avx2", kernels::Isa::kAvx2)
      .value("avx512", kernels::Isa::kAvx512);
  nb::enum_<kernels::GemmWay>(m, "GemmWay").value("own", kernels::GemmWay::kOwn).value("lent", kernels::GemmWay::kLent);

  m.def("isa", &kernels::isa);
  m.def("isa_available", &kernels::isa_available, "isa"_a);
  m.def("select_isa", &kernels::select_isa, "isa"_a);
  m.def("gemm_way", &kernels::gemm_way, "m"_a);
  m.def("gemm_scratch_bytes", &kernels::gemm_scratch_bytes, "dtype"_a, "m"_a, "n"_a, "k"_a);
  m.def(
      "gemm",
      [](DType dtype, int64_t rows, int64_t n, int64_t k, uintptr_t x, int64_t ldx, uintptr_t w, int64_t ldw,
         uintptr_t y, int64_t ldy, bool transpose_x, bool transpose_w) {
        kernels::gemm(dtype, rows, n, k, at(x), ldx, at(w), ldw, at(y), ldy, scratch(), transpose_x, transpose_w);
      },
      "dtype"_a, "m"_a, "n"_a, "k"_a, "x"_a, "ldx"_a, "w"_a, "ldw"_a, "y"_a, "ldy"_a, "transpose_x"_a = false,
      "transpose_w"_a = false, NoGil());
  m.def(
      "gemm_by",
      [](kernels::GemmWay way, DType dtype, int64_t rows, int64_t n, int64_t k, uintptr_t x, int64_t ldx, uintptr_t w,
         int64_t ldw, uintptr_t y, int64_t ldy, bool transpose_x, bool transpose_w) {
        kernels::gemm_by(way, dtype, rows, n, k, at(x), ldx, at(w), ldw, at(y), ldy, scratch(), transpose_x,
                         transpose_w);
      },
      "way"_a, "dtype"_a, "m"_a, "n"_a, "k"_a, "x"_a, "ldx"_a, "w"_a, "ldw"_a, "y"_a, "ldy"_a, "transpose_x"_a = false,
      "transpose_w"_a = false, NoGil());
  m.def(
      "swiglu",
      [](DType dtype, int64_t rows, int64_t cols, uintptr_t gate, int64_t ldg, uintptr_t up, int64_t ldu, uintptr_t out,
         int64_t ldo,
         float limit) { kernels::swiglu(dtype, rows, cols, at(gate), ldg, at(up), ldu, at(out), ldo, limit); },
      "dtype"_a, "rows"_a, "cols"_a, "gate"_a, "ldg"_a, "up"_a, "ldu"_a, "out"_a, "ldo"_a,
      "limit"_a = kernels::kNoLimit, NoGil());
  m.def(
      "copy_rows",
      [](DType dtype, int64_t rows, int64_t cols, uintptr_t x, int64_t ldx, uintptr_t out, int64_t ldo) {
        kernels::copy_rows(dtype, rows, cols, at(x), ldx, at(out), ldo);
      },
      "dtype"_a, "rows"_a, "cols"_a, "x"_a, "ldx"_a, "out"_a, "ldo"_a, NoGil());
  m.def(
      "gather_rows",
      [](DType dtype, int64_t rows, int64_t cols, uintptr_t x, int64_t ldx, int64_t x_rows, uintptr_t index,
         uintptr_t out, int64_t ldo) {
        return kernels::gather_rows(dtype, rows, cols, at(x), ldx, x_rows, at<int32_t>(index), at(out), ldo);
      },
      "dtype"_a, "rows"_a, "cols"_a, "x"_a, "ldx"_a, "x_rows"_a, "index"_a, "out"_a, "ldo"_a, NoGil());
  m.def(
      "unpermute",
      [](DType dtype, int64_t tokens, int64_t k, int64_t cols, uintptr_t y, int64_t ldy, int64_t y_rows,
         uintptr_t index, uintptr_t weights, uintptr_t out, int64_t ldo) {
        return kernels::unpermute(dtype, tokens, k, cols, at(y), ldy, y_rows, at<int32_t>(index), at<float>(weights),
                                  at(out), ldo);
      },
      "dtype"_a, "tokens"_a, "k"_a, "cols"_a, "y"_a, "ldy"_a, "y_rows"_a, "index"_a, "weights"_a, "out"_a, "ldo"_a,
      NoGil());
  m.def(
      "convert",
      [](int64_t rows, int64_t cols, DType from, uintptr_t x, int64_t ldx, DType to, uintptr_t out, int64_t ldo) {
        kernels::convert(rows, cols, from, at(x), ldx, to, at(out), ldo);
      },
      "rows"_a, "cols"_a, "source_dtype"_a, "x"_a, "ldx"_a, "out_dtype"_a, "out"_a, "ldo"_a, NoGil());

  m.def("lend_gemm", &lend_gemm, "create_tensor_from_blob"_a, "delete_tensor"_a, "mm_out"_a, "get_num_threads"_a,
        "omp_set_num_threads"_a, "mkl_set_num_threads_local"_a);
  m.def("take_gemm_back", [] { kernels::lend_gemm(nullptr); });
  m.def("gemm_is_lent", &kernels::gemm_is_lent);
  m.def("lent_gemm_thread_init", &kernels::lent_gemm_thread_init);
}
