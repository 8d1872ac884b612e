// The Python extension hyper_mpmd._native: thin bindings, no logic of its own.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "hyper_mpmd/version.h"

namespace nb = nanobind;

void bind_engine(nb::module_& m);   // engine.cpp
void bind_kernels(nb::module_& m);  // kernels.cpp

NB_MODULE(_native, m) {
  m.def("version", &hyper_mpmd::version);
  bind_engine(m);
  bind_kernels(m);
  hyper_mpmd::bind_planner(m);
  hyper_mpmd::bind_records(m);
}
