// One tile on the CPU: from a task record to the kernel that computes it.
#pragma once

#include <string>

#include "hyper_mpmd/plan_image.h"
#include "hyper_mpmd/scratch.h"

namespace hyper_mpmd {

// Memory of every tensor, [rank][tensor].
using TensorTable = std::vector<std::vector<void*>>;

// Compute the task's output boxes. Returns what went wrong, empty if nothing. Python kernels are not run here.
std::string run_kernel(const PlanImage& image, const TensorTable& tensors, const TaskRecord& task,
                       kernels::Scratch& scratch);

// The most scratch that any task of the plan takes, bytes.
size_t scratch_bytes(const PlanImage& image);

}  // namespace hyper_mpmd
