// The Python extension hyper_mpmd._native: thin bindings, no logic of its own.
#include <nanobind/nanobind.h>

#include "hyper_mpmd/version.h"
#include "planner.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.def("version", &hyper_mpmd::version);
  hyper_mpmd::bind_planner(m);
}
