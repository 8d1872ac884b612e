#include "hyper_mpmd/shmem_process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace hyper_mpmd::shmem {

namespace {

struct Stat {
  char state;
  std::uint64_t start;
};

// Fields 3 (state) and 22 (start time) of /proc/<pid>/stat. The name, field 2, may hold blanks and brackets, so the
// fields are counted from the last bracket.
std::optional<Stat> read_stat(std::int64_t pid, int* error) {
  char path[48];
  std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    *error = errno;
    return std::nullopt;
  }
  char text[1024];
  const ssize_t got = ::read(file, text, sizeof text - 1);
  *error = got < 0 ? errno : 0;
  ::close(file);
  if (got <= 0) return std::nullopt;
  const std::string_view line(text, static_cast<std::size_t>(got));
  const std::size_t bracket = line.rfind(')');
  if (bracket == std::string_view::npos || bracket + 2 >= line.size()) return std::nullopt;
  text[got] = '\0';
  const char* at = text + bracket + 2;
  const char state = *at;
  for (int field = 3; field < 22; ++field) {
    while (*at != ' ' && *at != '\0') ++at;
    if (*at == '\0') return std::nullopt;
    ++at;
  }
  return Stat{state, std::strtoull(at, nullptr, 10)};
}

// The quota of one control group in processors, or nothing where there is none.
std::optional<double> quota_of(const std::string& folder) {
  std::ifstream unified(folder + "/cpu.max");
  std::string quota;
  double period = 0;
  if (unified >> quota >> period && quota != "max" && period > 0) return std::atof(quota.c_str()) / period;
  std::ifstream old_quota(folder + "/cpu.cfs_quota_us");
  std::ifstream old_period(folder + "/cpu.cfs_period_us");
  double number = 0;
  if (old_quota >> number && old_period >> period && number > 0 && period > 0) return number / period;
  return std::nullopt;
}

}  // namespace

ProcessId this_process() {
  int error = 0;
  const auto stat = read_stat(::getpid(), &error);
  return {::getpid(), stat ? stat->start : 0};
}

bool is_alive(const ProcessId& process) {
  int error = 0;
  const auto stat = read_stat(process.pid, &error);
  if (!stat) {
    if (error == ENOENT || error == ESRCH) return false;
    // No descriptor left, or /proc is hidden: that says nothing about the peer, so ask for the pid alone.
    return ::kill(static_cast<pid_t>(process.pid), 0) == 0 || errno == EPERM;
  }
  if (stat->state == 'Z' || stat->state == 'X' || stat->state == 'x') return false;
  return process.start == 0 || stat->start == process.start;
}

int usable_processors() {
  int count = 1;
  cpu_set_t set;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) {
    count = CPU_COUNT(&set);
  } else {
    count = static_cast<int>(std::max(1L, ::sysconf(_SC_NPROCESSORS_ONLN)));
  }
  double limit = count;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && controllers.find("cpu") == std::string::npos) continue;
    const std::string root = controllers.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controllers;
    // A quota may be set on any group above this one as well.
    std::string path = line.substr(second + 1);
    while (true) {
      if (const auto quota = quota_of(root + path)) limit = std::min(limit, *quota);
      const std::size_t slash = path.rfind('/');
      if (slash == std::string::npos || path.empty()) break;
      path.resize(slash);
    }
  }
  return std::max(1, static_cast<int>(std::ceil(limit)));
}

}  // namespace hyper_mpmd::shmem
