#include "hyper_mpmd/shmem_mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "hyper_mpmd/shmem_layout.h"

namespace hyper_mpmd::shmem {

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr const char* kFallbackFolder = "/dev/shm";

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

struct Ranges {
  std::mutex lock;
  std::map<std::uintptr_t, std::size_t> own;  // base -> bytes
  int alive = 0;
};

// Never destroyed: a tensor may let go of its mapping after the statics of this library are gone.
Ranges& ranges() {
  static Ranges* all = new Ranges;
  return *all;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    number_ = other.release();
  }
  return *this;
}

int Descriptor::release() { return std::exchange(number_, -1); }

void Descriptor::reset() {
  if (number_ >= 0) ::close(number_);
  number_ = -1;
}

std::shared_ptr<Mapping> Mapping::create(std::size_t bytes, Backing backing) {
  Descriptor file;
  if (backing == Backing::kMemfd) {
    file = Descriptor(::memfd_create("hyper_mpmd_heap", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!file) fail("memfd_create of a heap");
    if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
      fail("sizing a heap of " + std::to_string(bytes) + " bytes");
    // Nobody, not even a peer gone wrong, can now cut the memory short while others work in it.
    if (::fcntl(file.get(), F_ADD_SEALS, kSeals) != 0) fail("sealing a heap");
  } else {
    struct statvfs space{};
    if (::statvfs(kFallbackFolder, &space) != 0) fail(std::string("asking for the free space of ") + kFallbackFolder);
    const auto available = static_cast<unsigned long long>(space.f_bavail) * space.f_frsize;
    if (available < bytes) {
      throw std::runtime_error(std::string(kFallbackFolder) + " has " + std::to_string(available) +
                               " bytes free, the heap needs " + std::to_string(bytes));
    }
    file = Descriptor(::open(kFallbackFolder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (!file) fail(std::string("an unnamed file in ") + kFallbackFolder);
    if (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
      fail("sizing a heap of " + std::to_string(bytes) + " bytes");
    // The space is taken at once: others may fill the file system after we looked.
    if (const int error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes)); error != 0) {
      throw std::system_error(error, std::generic_category(), "taking " + std::to_string(bytes) + " bytes");
    }
  }
  return std::shared_ptr<Mapping>(new Mapping(std::move(file), bytes, true));
}

std::shared_ptr<Mapping> Mapping::adopt(Descriptor file, std::size_t bytes) {
  struct stat about{};
  if (::fstat(file.get(), &about) != 0) fail("looking at a peer's heap");
  if (static_cast<std::size_t>(about.st_size) != bytes) {
    throw std::runtime_error("a peer's heap has " + std::to_string(about.st_size) + " bytes, this rank's has " +
                             std::to_string(bytes));
  }
  // A memfd that could be sealed and is not could be cut short later. A plain file cannot be sealed: there the call
  // fails or, on tmpfs, says that its (empty) set of seals is final.
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals >= 0 && (seals & (F_SEAL_SHRINK | F_SEAL_SEAL)) == 0)
    throw std::runtime_error("a peer's heap is not sealed");
  auto mapping = std::shared_ptr<Mapping>(new Mapping(std::move(file), bytes, false));
  mapping->file_.reset();
  return mapping;
}

Mapping::Mapping(Descriptor file, std::size_t bytes, bool own) : file_(std::move(file)), bytes_(bytes), own_(own) {
  // Address space first, larger by one alignment; the memory then goes over its aligned part.
  const std::size_t room = (bytes + kPage - 1) / kPage * kPage + kBaseAlignment;
  void* reserved = ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) fail("address space for a heap of " + std::to_string(bytes) + " bytes");
  const auto first = reinterpret_cast<std::uintptr_t>(reserved);
  // The header sits below the aligned address, so that offset 0 of the heap is aligned.
  const std::uintptr_t heap = (first + kHeaderBytes + kBaseAlignment - 1) / kBaseAlignment * kBaseAlignment;
  const std::uintptr_t at = heap - kHeaderBytes;
  const std::uintptr_t end = at + (bytes + kPage - 1) / kPage * kPage;
  void* mapped =
      ::mmap(reinterpret_cast<void*>(at), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_.get(), 0);
  if (mapped == MAP_FAILED) {
    const int error = errno;
    ::munmap(reserved, room);
    errno = error;
    fail("mapping a heap of " + std::to_string(bytes) + " bytes");
  }
  if (at > first) ::munmap(reserved, at - first);
  if (first + room > end) ::munmap(reinterpret_cast<void*>(end), first + room - end);
  base_ = static_cast<std::byte*>(mapped);
  Ranges& all = ranges();
  const std::lock_guard guard(all.lock);
  ++all.alive;
  if (own_) all.own.emplace(at, bytes);
}

Mapping::~Mapping() {
  // The range leaves the books before the address space can be given to another mapping.
  {
    Ranges& all = ranges();
    const std::lock_guard guard(all.lock);
    --all.alive;
    if (own_) all.own.erase(reinterpret_cast<std::uintptr_t>(base_));
  }
  ::munmap(base_, bytes_);
}

void Mapping::commit(std::size_t offset, std::size_t bytes) {
  if (bytes == 0) return;
  int error = 0;
  do {
    error = ::posix_fallocate(file_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error != 0) {
    throw std::system_error(error, std::generic_category(), "taking " + std::to_string(bytes) + " bytes of memory");
  }
}

void Mapping::discard(std::size_t offset, std::size_t bytes) {
  const std::size_t first = (offset + kPage - 1) / kPage * kPage;
  const std::size_t last = (offset + bytes) / kPage * kPage;
  if (last <= first) return;
  // Keeping the pages instead is no error: they are reused by the next allocation.
  (void)::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first),
                    static_cast<off_t>(last - first));
}

bool in_own_mapping(std::uintptr_t address) {
  Ranges& all = ranges();
  const std::lock_guard guard(all.lock);
  auto next = all.own.upper_bound(address);
  if (next == all.own.begin()) return false;
  --next;
  return address - next->first < next->second;
}

int mappings_alive() {
  Ranges& all = ranges();
  const std::lock_guard guard(all.lock);
  return all.alive;
}

}  // namespace hyper_mpmd::shmem
