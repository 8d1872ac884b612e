// How ranks come by each other's memory: everyone makes its own, tells a card of a few words by any channel, and then
// passes the descriptor over a local socket (SCM_RIGHTS). "Same host" is not assumed: it is that this worked.
#pragma once

#include <sys/un.h>

#include <array>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "hyper_mpmd/shmem_heap.h"

namespace hyper_mpmd::shmem {

// What a rank tells the others before they connect.
struct Card {
  ProcessId process;
  std::uint64_t heap_bytes = 0;
  std::string address;  // of its socket: 32 hexadecimal digits nobody can guess
};

// A peer whose memory could not be had. `dead` when its process has ended.
class ConnectError : public std::runtime_error {
 public:
  ConnectError(int rank, bool dead, const std::string& what) : std::runtime_error(what), rank(rank), dead(dead) {}
  int rank;
  bool dead;
};

// A heap on its way into a group. Construct, tell `card()`, `expect` the cards of all, `progress` until true, `finish`.
class Invitation {
 public:
  Invitation(int rank, int world, std::uint64_t heap_bytes, Backing backing = Backing::kMemfd);

  const Card& card() const { return card_; }
  // Cards by rank, own included. Throws ConnectError where a peer's cannot belong to this group.
  void expect(std::vector<Card> cards);
  // Sends and takes descriptors until all are there (true) or `until`; throws ConnectError.
  bool progress(Clock::time_point until);
  // Who has not been heard of yet.
  std::vector<int> missing() const;
  // The connected heap; the socket is gone with it.
  std::unique_ptr<SymmetricHeap> finish();
  // Lets go of memory, sockets and descriptors at once; nothing can be done with it afterwards.
  void abandon();

 private:
  struct Greeting {
    std::uint64_t magic;
    std::int32_t rank;
    std::array<char, 32> address;  // the receiver's: shows that the sender has its card
  };
  bool send_to(int peer);
  void accept_all();
  // False while nothing has come on this socket yet.
  bool receive(const Descriptor& socket);

  int rank_;
  int world_;
  Card card_;
  std::unique_ptr<SymmetricHeap> heap_;
  Descriptor listener_;
  std::vector<Card> cards_;
  std::vector<bool> sent_;
  std::vector<bool> received_;
  std::vector<Descriptor> accepted_;
  Clock::time_point next_look_;  // at who is alive; kept over calls, which may each be shorter than the interval
};

}  // namespace hyper_mpmd::shmem
