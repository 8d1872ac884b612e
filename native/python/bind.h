// The parts of the extension, each in its own file.
#pragma once

#include <nanobind/nanobind.h>

namespace hyper_mpmd {

void bind_engine(nanobind::module_& parent);     // adds the submodule `engine`
void bind_explore(nanobind::module_& parent);    // adds the submodule `explore`
void bind_kernels(nanobind::module_& parent);    // adds the submodule `kernels`
void bind_planner(nanobind::module_& parent);    // adds the submodule `planner`
void bind_prover(nanobind::module_& parent);     // adds the submodule `prover`
void bind_records(nanobind::module_& parent);    // adds the submodule `records`
void bind_shmem(nanobind::module_& parent);      // adds the submodule `shmem`
void bind_simulator(nanobind::module_& parent);  // adds the submodule `simulator`

}  // namespace hyper_mpmd
