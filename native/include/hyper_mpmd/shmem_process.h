// Is the process behind a rank still there? Asked of the kernel by pid and start time: a socket, a pipe or a lock of a
// dead rank can be kept alive by a child it forked, its own entry in the process table cannot.
#pragma once

#include "hyper_mpmd/shmem_layout.h"

namespace hyper_mpmd::shmem {

// This process.
ProcessId this_process();
// False once the process has ended, also while it waits to be reaped and when its pid went to another process.
bool is_alive(const ProcessId& process);
// Processors this process may use: affinity, and the CPU quota of its control group, rounded up.
int usable_processors();

}  // namespace hyper_mpmd::shmem
