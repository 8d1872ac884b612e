// The Python extension hyper_mpmd._native: thin bindings, no logic of its own.
#include <nanobind/nanobind.h>

#include "bind.h"
#include "hyper_mpmd/version.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  // Plans that a user still holds when the interpreter ends are no leak worth telling.
  nanobind::set_leak_warnings(false);
  m.def("version", &hyper_mpmd::version);
  hyper_mpmd::bind_engine(m);
  hyper_mpmd::bind_explore(m);
  hyper_mpmd::bind_kernels(m);
  hyper_mpmd::bind_planner(m);
  hyper_mpmd::bind_prover(m);
  hyper_mpmd::bind_records(m);
  hyper_mpmd::bind_shmem(m);
  hyper_mpmd::bind_simulator(m);
}
