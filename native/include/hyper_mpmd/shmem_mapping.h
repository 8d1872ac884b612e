// Memory that several processes map. It has no name in any file system, so nothing is left to sweep after a kill.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hyper_mpmd::shmem {

// A descriptor, closed with its owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  int get() const { return number_; }
  explicit operator bool() const { return number_ >= 0; }
  int release();
  void reset();

 private:
  int number_ = -1;
};

// What the memory is made of: a memfd; or, where the kernel gives none, a file without a name in /dev/shm (0600).
enum class Backing { kMemfd, kUnnamedFile };

// `bytes` of shared memory mapped here. Tensors share the ownership, so it stays mapped until the last is gone.
class Mapping {
 public:
  // Fresh zeroed memory; throws std::system_error, and says how much is free when a file system is too small.
  static std::shared_ptr<Mapping> create(std::size_t bytes, Backing backing);
  // Memory a peer made; throws when its size is not `bytes` or it could still be cut short under our feet.
  static std::shared_ptr<Mapping> adopt(Descriptor file, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  int descriptor() const { return file_.get(); }

  // Takes real pages for a range now, so that a full machine is an error here and not a SIGBUS later.
  void commit(std::size_t offset, std::size_t bytes);
  // Gives the whole pages inside a range back to the system.
  void discard(std::size_t offset, std::size_t bytes);

 private:
  Mapping(Descriptor file, std::size_t bytes, bool own);
  Descriptor file_;
  std::size_t bytes_ = 0;
  std::byte* base_ = nullptr;
  bool own_ = false;
};

// Whether an address lies in memory that `Mapping::create` made in this process and that is still mapped.
bool in_own_mapping(std::uintptr_t address);
// How many mappings this process holds, its own and its peers'.
int mappings_alive();

}  // namespace hyper_mpmd::shmem
