#pragma once

#include <nanobind/nanobind.h>

namespace hyper_mpmd {

// Adds the submodule `planner`.
void bind_planner(nanobind::module_& parent);

}  // namespace hyper_mpmd
