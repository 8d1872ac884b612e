// The Python extension hyper_mpmd._native: thin bindings, no logic of its own.
#include <nanobind/nanobind.h>

#include "hyper_mpmd/version.h"

namespace nb = nanobind;

void bind_shmem(nb::module_& m);

NB_MODULE(_native, m) {
  m.def("version", &hyper_mpmd::version);
  bind_shmem(m);
}
