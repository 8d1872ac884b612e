#include "run_kernel.h"

#include <algorithm>
#include <bit>

#include "hyper_mpmd/kernels.h"

namespace hyper_mpmd {

namespace {

// A box with the memory behind it.
struct View {
  std::byte* data;
  int64_t ld;  // elements from one row to the next
  int64_t rows, cols;
  DType dtype;
};

View view_of(const PlanImage& image, const TensorTable& tensors, const AccessRecord& box) {
  const TensorRecord& tensor = image.tensors[box.tensor];
  const auto dtype = static_cast<DType>(tensor.dtype);
  const auto ld = static_cast<int64_t>(tensor.cols);
  auto* base = static_cast<std::byte*>(tensors[box.rank][box.tensor]);
  return {base + (box.row * ld + box.col) * size_of(dtype), ld, box.rows, box.cols, dtype};
}

std::string bad_index(const View& index, int64_t position, int64_t limit) {
  const auto* values = reinterpret_cast<const int32_t*>(index.data);
  return "index " + std::to_string(values[position]) + " at row " + std::to_string(position / index.cols) +
         " of the tile is not in [0, " + std::to_string(limit) + ")";
}

}  // namespace

std::string run_kernel(const PlanImage& image, const TensorTable& tensors, const TaskRecord& task,
                       kernels::Scratch& scratch) {
  const OpRecord& op = image.ops[task.op];
  const AccessRecord* boxes = image.accesses.data() + task.access_begin;
  const float limit = std::bit_cast<float>(op.limit_bits);
  auto box = [&](int i) { return view_of(image, tensors, boxes[i]); };
  switch (static_cast<Kernel>(op.kernel)) {
    case Kernel::kNop:
    case Kernel::kPython:
      break;
    case Kernel::kCopy: {
      const View x = box(0), y = box(1);
      kernels::copy_rows(x.dtype, x.rows, x.cols, x.data, x.ld, y.data, y.ld);
      break;
    }
    case Kernel::kPermute: {
      const View x = box(0), index = box(1), y = box(2);
      const int64_t bad = kernels::gather_rows(x.dtype, y.rows, y.cols, x.data, x.ld, x.rows,
                                               reinterpret_cast<const int32_t*>(index.data), y.data, y.ld);
      if (bad != kernels::kIndexesGood) return bad_index(index, bad, x.rows);
      break;
    }
    case Kernel::kGemm: {
      const View x = box(0), w = box(1), y = box(2);
      kernels::gemm(x.dtype, y.rows, y.cols, x.cols, x.data, x.ld, w.data, w.ld, y.data, y.ld, scratch);
      break;
    }
    case Kernel::kGemmWT: {
      const View x = box(0), w = box(1), y = box(2);
      kernels::gemm(x.dtype, y.rows, y.cols, x.cols, x.data, x.ld, w.data, w.ld, y.data, y.ld, scratch, false, true);
      break;
    }
    case Kernel::kGemmXT: {
      const View x = box(0), w = box(1), y = box(2);
      kernels::gemm(x.dtype, y.rows, y.cols, x.rows, x.data, x.ld, w.data, w.ld, y.data, y.ld, scratch, true, false);
      break;
    }
    case Kernel::kSwiGLU: {
      const View gate = box(0), up = box(1), y = box(2);
      kernels::swiglu(y.dtype, y.rows, y.cols, gate.data, gate.ld, up.data, up.ld, y.data, y.ld, limit);
      break;
    }
    case Kernel::kWeightedSwiGLU: {
      const View gate = box(0), up = box(1), weights = box(2), y = box(3);
      kernels::weighted_swiglu(y.dtype, y.rows, y.cols, gate.data, gate.ld, up.data, up.ld,
                               reinterpret_cast<const float*>(weights.data), y.data, y.ld, limit);
      break;
    }
    case Kernel::kSwiGLUGrad: {
      const View gate = box(0), up = box(1), grad = box(2), weights = box(3);
      const View d_gate = box(4), d_up = box(5), dots = box(6);
      kernels::swiglu_grad(grad.dtype, grad.rows, grad.cols, gate.data, gate.ld, up.data, up.ld, grad.data, grad.ld,
                           reinterpret_cast<const float*>(weights.data), d_gate.data, d_gate.ld, d_up.data, d_up.ld,
                           reinterpret_cast<float*>(dots.data), limit);
      break;
    }
    case Kernel::kGatherSum: {
      const View x = box(0), index = box(1), y = box(2);
      const int64_t bad = kernels::unpermute(x.dtype, y.rows, index.cols, y.cols, x.data, x.ld, x.rows,
                                             reinterpret_cast<const int32_t*>(index.data), nullptr, y.data, y.ld);
      if (bad != kernels::kIndexesGood) return bad_index(index, bad, x.rows);
      break;
    }
    case Kernel::kUnpermute: {
      const View x = box(0), index = box(1), weights = box(2), y = box(3);
      const int64_t bad = kernels::unpermute(x.dtype, y.rows, index.cols, y.cols, x.data, x.ld, x.rows,
                                             reinterpret_cast<const int32_t*>(index.data),
                                             reinterpret_cast<const float*>(weights.data), y.data, y.ld);
      if (bad != kernels::kIndexesGood) return bad_index(index, bad, x.rows);
      break;
    }
  }
  return {};
}

size_t scratch_bytes(const PlanImage& image) {
  size_t most = 0;
  for (const TaskRecord& task : image.tasks) {
    const auto kernel = static_cast<Kernel>(image.ops[task.op].kernel);
    if (kernel != Kernel::kGemm && kernel != Kernel::kGemmWT && kernel != Kernel::kGemmXT) continue;
    const AccessRecord* box = image.accesses.data() + task.access_begin;
    const auto dtype = static_cast<DType>(image.tensors[box[2].tensor].dtype);
    most = std::max(most, kernels::gemm_scratch_bytes(dtype, box[2].rows, box[2].cols,
                                                      kernel == Kernel::kGemmXT ? box[0].rows : box[0].cols));
  }
  return most;
}

}  // namespace hyper_mpmd
