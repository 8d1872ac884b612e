#include "hyper_mpmd/shmem_connect.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "hyper_mpmd/shmem_process.h"

namespace hyper_mpmd::shmem {

namespace {

constexpr std::size_t kAddressDigits = 32;

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

std::string random_address() {
  unsigned char bytes[kAddressDigits / 2];
  if (::getrandom(bytes, sizeof bytes, 0) != static_cast<ssize_t>(sizeof bytes)) fail("random bytes for an address");
  std::string digits;
  for (const unsigned char byte : bytes) {
    digits += "0123456789abcdef"[byte >> 4];
    digits += "0123456789abcdef"[byte & 15];
  }
  return digits;
}

// Abstract: the name is not in any file system and ends with the socket.
socklen_t fill_address(const std::string& digits, sockaddr_un* address) {
  std::memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  const std::string name = "hyper_mpmd-" + digits;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Descriptor open_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) fail("a local socket");
  return socket;
}

// The kernel's word for who is at the other end.
ucred credentials(const Descriptor& socket) {
  ucred who{};
  socklen_t size = sizeof who;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) fail("asking who a peer is");
  return who;
}

}  // namespace

Invitation::Invitation(int rank, int world, std::uint64_t heap_bytes, Backing backing)
    : rank_(rank),
      world_(world),
      heap_(std::make_unique<SymmetricHeap>(rank, world, heap_bytes, backing)),
      sent_(static_cast<std::size_t>(world)),
      received_(static_cast<std::size_t>(world)) {
  card_ = {this_process(), heap_->heap_bytes(), random_address()};
  sent_[static_cast<std::size_t>(rank)] = received_[static_cast<std::size_t>(rank)] = true;
  if (world == 1) return;
  listener_ = open_socket();
  sockaddr_un address;
  const socklen_t size = fill_address(card_.address, &address);
  if (::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) fail("binding a local socket");
  if (::listen(listener_.get(), world) != 0) fail("listening on a local socket");
}

void Invitation::expect(std::vector<Card> cards) {
  if (cards.size() != static_cast<std::size_t>(world_)) {
    throw std::invalid_argument(std::to_string(cards.size()) + " cards for " + std::to_string(world_) + " ranks");
  }
  for (int peer = 0; peer < world_; ++peer) {
    const Card& card = cards[static_cast<std::size_t>(peer)];
    if (card.address.size() != kAddressDigits) throw ConnectError(peer, false, "its card has no address");
    if (card.heap_bytes != card_.heap_bytes) {
      throw ConnectError(peer, false,
                         "its heap has " + std::to_string(card.heap_bytes) + " bytes, that of rank " +
                             std::to_string(rank_) + " has " + std::to_string(card_.heap_bytes));
    }
  }
  cards_ = std::move(cards);
}

bool Invitation::send_to(int peer) {
  const Card& card = cards_[static_cast<std::size_t>(peer)];
  const Descriptor socket = open_socket();
  sockaddr_un address;
  const socklen_t size = fill_address(card.address, &address);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), size) != 0) {
    if (errno == EAGAIN || errno == EINTR) return false;  // its queue is full: later
    const int error = errno;
    const bool dead = !is_alive(card.process);
    throw ConnectError(peer, dead,
                       dead ? "its process " + std::to_string(card.process.pid) + " has ended"
                            : std::string("its socket cannot be reached from here (") + std::strerror(error) +
                                  "): it has given up, or runs on another host or in another network namespace, so "
                                  "its memory cannot be mapped");
  }
  const ucred who = credentials(socket);
  if (who.uid != ::geteuid() || who.pid != card.process.pid) {
    throw ConnectError(peer, false,
                       "its socket belongs to process " + std::to_string(who.pid) + " of user " +
                           std::to_string(who.uid) + ", its card says process " + std::to_string(card.process.pid) +
                           ": ranks need one user and one pid namespace");
  }
  Greeting greeting{kMagic, rank_, {}};
  std::memcpy(greeting.address.data(), card.address.data(), kAddressDigits);
  iovec part{&greeting, sizeof greeting};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  head->cmsg_level = SOL_SOCKET;
  head->cmsg_type = SCM_RIGHTS;
  head->cmsg_len = CMSG_LEN(sizeof(int));
  const int descriptor = heap_->memory(rank_)->descriptor();
  std::memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
  if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof greeting)) {
    throw ConnectError(peer, !is_alive(card.process),
                       std::string("passing the heap to it failed: ") + std::strerror(errno));
  }
  return true;  // what was sent stays readable after this end is closed
}

void Invitation::accept_all() {
  while (true) {
    Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EAGAIN || errno == EINTR || errno == ECONNABORTED) return;
      fail("accepting a peer");
    }
    accepted_.push_back(std::move(socket));
  }
}

bool Invitation::receive(const Descriptor& socket) {
  Greeting greeting{};
  iovec part{&greeting, sizeof greeting};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t got = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  Descriptor file;
  if (const cmsghdr* head = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
      head != nullptr && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS) {
    int descriptor = -1;
    std::memcpy(&descriptor, CMSG_DATA(head), sizeof descriptor);
    file = Descriptor(descriptor);
  }
  // Anybody on the host can connect. Only the process the card of that rank names is listened to; others are dropped.
  if (got != static_cast<ssize_t>(sizeof greeting) || greeting.magic != kMagic || !file || greeting.rank < 0 ||
      greeting.rank >= world_ || std::memcmp(greeting.address.data(), card_.address.data(), kAddressDigits) != 0) {
    return true;
  }
  const auto peer = static_cast<std::size_t>(greeting.rank);
  const ucred who = credentials(socket);
  if (who.uid != ::geteuid() || who.pid != cards_[peer].process.pid || received_[peer]) return true;
  try {
    heap_->attach(greeting.rank, Mapping::adopt(std::move(file), heap_->memory(rank_)->bytes()), cards_[peer].process);
  } catch (const std::exception& error) {
    throw ConnectError(greeting.rank, false, std::string("its memory could not be mapped: ") + error.what());
  }
  received_[peer] = true;
  return true;
}

bool Invitation::progress(Clock::time_point until) {
  if (!heap_ || cards_.empty()) throw std::logic_error("expect() comes before progress(), and neither after the end");
  constexpr int kSliceMs = 20;
  while (true) {
    bool done = true;
    for (int peer = 0; peer < world_; ++peer) {
      const auto index = static_cast<std::size_t>(peer);
      if (!sent_[index]) sent_[index] = send_to(peer);
      done = done && sent_[index] && received_[index];
    }
    if (done) return true;
    const auto now = Clock::now();
    if (now >= until) return false;
    std::vector<pollfd> watched{{listener_.get(), POLLIN, 0}};
    for (const Descriptor& socket : accepted_) watched.push_back({socket.get(), POLLIN, 0});
    ::poll(watched.data(), watched.size(), kSliceMs);
    accept_all();
    std::erase_if(accepted_, [this](const Descriptor& socket) { return receive(socket); });
    if (now < next_look_) continue;
    next_look_ = now + SymmetricHeap::kPollEvery;
    for (int peer = 0; peer < world_; ++peer) {
      const ProcessId& process = cards_[static_cast<std::size_t>(peer)].process;
      if (!is_alive(process)) {
        throw ConnectError(peer, true, "its process " + std::to_string(process.pid) + " has ended");
      }
    }
  }
}

std::vector<int> Invitation::missing() const {
  std::vector<int> ranks;
  for (int peer = 0; peer < world_; ++peer) {
    if (!received_[static_cast<std::size_t>(peer)]) ranks.push_back(peer);
  }
  return ranks;
}

void Invitation::abandon() {
  heap_.reset();
  listener_.reset();
  accepted_.clear();
  cards_.clear();
}

std::unique_ptr<SymmetricHeap> Invitation::finish() {
  if (!heap_ || !missing().empty()) throw std::logic_error("finish() before every peer's memory came");
  listener_.reset();
  accepted_.clear();
  return std::move(heap_);
}

}  // namespace hyper_mpmd::shmem
