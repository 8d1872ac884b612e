// The symmetric heap without Python: threads as ranks (for the sanitizers) and forked processes as ranks.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "hyper_mpmd/shmem_connect.h"
#include "hyper_mpmd/shmem_process.h"

using namespace hyper_mpmd::shmem;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

Clock::time_point soon() { return Clock::now() + seconds(60); }

int heaps_mapped() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("hyper_mpmd_heap") != std::string::npos ? 1 : 0;
  return count;
}

template <class Function>
void on_threads(std::vector<std::unique_ptr<SymmetricHeap>>& heaps, Function function) {
  std::vector<std::thread> threads;
  for (auto& heap : heaps) threads.emplace_back([&heap, function] { function(*heap); });
  for (auto& thread : threads) thread.join();
}

void barrier(SymmetricHeap& heap) {
  CHECK(heap.wait_all(heap.enter(Collective::kBarrier, 0, 0, false, "barrier"), soon()) == Status::kDone);
}

void rows_follow_signals_between_threads() {
  auto heaps = SymmetricHeap::local_world(3, 1 << 20);
  on_threads(heaps, [](SymmetricHeap& heap) {
    const auto rows = heap.allocate(3 * 4096, 64);
    const auto flags = heap.allocate(3 * 64, 64);
    CHECK(rows && flags && *rows == 0);
    barrier(heap);
    const int next = (heap.rank() + 1) % 3;
    const int previous = (heap.rank() + 2) % 3;
    std::vector<int> row(1024);
    for (int n = 1; n <= 200; ++n) {
      for (int& value : row) value = n * 10 + heap.rank();
      heap.put(next, *rows + 4096 * static_cast<std::uint64_t>(heap.rank()), row.data(), 4096);
      heap.signal(next, *flags + 64 * static_cast<std::uint64_t>(heap.rank()), 1, SignalOperation::kAdd);
      CHECK(heap.wait_signal(*flags + 64 * static_cast<std::uint64_t>(previous), n, Comparison::kGe, soon()) ==
            Status::kDone);
      const auto* got = reinterpret_cast<const int*>(heap.base(heap.rank()) + *rows) + 1024 * previous;
      for (int i = 0; i < 1024; ++i) CHECK(got[i] == n * 10 + previous);
      barrier(heap);
    }
    CHECK(heap.free(*rows, 3 * 4096));
    CHECK(!heap.free(*rows, 3 * 4096));
  });
}

// Every collective of every generation goes through on all ranks or on none, whoever aborts when.
void collectives_are_all_or_none_under_aborts() {
  constexpr int kWorld = 4;
  constexpr int kRounds = 300;
  auto heaps = SymmetricHeap::local_world(kWorld, 1 << 20);
  std::vector<std::vector<std::pair<std::uint32_t, std::uint64_t>>> through(kWorld);
  on_threads(heaps, [&](SymmetricHeap& heap) {
    unsigned random = 12345U + static_cast<unsigned>(heap.rank());
    auto& mine = through[static_cast<std::size_t>(heap.rank())];
    while (heap.generation() < kRounds) {
      random = random * 1664525U + 1013904223U;
      const auto number = heap.enter(Collective::kBarrier, 0, 0, false, "");
      Status status = Status::kPending;
      if ((random >> 16) % 7 == 0) {
        status = heap.abort(AbortReason::kError, "rank " + std::to_string(heap.rank()) + " had enough", number);
        // It went through already: end the next thing instead.
        if (status == Status::kDone) (void)heap.abort(AbortReason::kError, "later");
      } else {
        status = heap.wait_all(number, soon());
      }
      if (status == Status::kDone) mine.emplace_back(heap.generation(), number);
      CHECK(status != Status::kLost && status != Status::kPending);
      if (status == Status::kAborted || heap.aborted()) {
        const auto why = heap.abort_state();
        CHECK(why && (why->text.find("had enough") != std::string::npos || why->text == "later"));
        CHECK(heap.meet(soon()) == Status::kDone);
        CHECK(heap.collectives() == 0);
      }
    }
  });
  for (const auto& each : through) CHECK(each == through[0]);
}

void a_deadline_and_a_wait_in_another_thread_end_with_an_abort() {
  auto heaps = SymmetricHeap::local_world(2, 1 << 16);
  SymmetricHeap& first = *heaps[0];
  CHECK(first.wait_signal(0, 1, Comparison::kEq, Clock::now() + milliseconds(30)) == Status::kPending);
  std::thread waiter([&] {
    CHECK(heaps[1]->wait_signal(64, 1, Comparison::kEq, soon()) == Status::kAborted);
    CHECK(heaps[1]->abort_state()->text == "rank 0 gave up");
    CHECK(heaps[1]->abort_state()->reason == AbortReason::kDeadline);
  });
  std::this_thread::sleep_for(milliseconds(30));
  CHECK(first.abort(AbortReason::kDeadline, "rank 0 gave up") == Status::kAborted);
  waiter.join();
  std::thread other([&] { CHECK(heaps[1]->meet(soon()) == Status::kDone); });
  CHECK(first.meet(soon()) == Status::kDone);
  other.join();
  CHECK(!first.aborted() && !heaps[1]->aborted() && first.generation() == 2);
}

void a_text_is_read_whole() {
  auto text = std::make_unique<SharedText<16>>();
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (int n = 0; n < 20'000; ++n) text->write(std::string(100, static_cast<char>('a' + n % 26)));
    stop = true;
  });
  while (!stop) {
    const std::string seen = text->read();
    CHECK(seen.empty() || seen == std::string(100, seen[0]));
  }
  writer.join();
  text->write(std::string(500, 'x'));
  CHECK(text->read() == std::string(SharedText<16>::kBytes, 'x'));
}

void decisions_keep_their_fields_and_their_order() {
  for (const std::uint32_t generation : {1U, 0xFFFFFFU}) {
    const Decision sent{generation, true, AbortReason::kError, 255, 0xFFFF};
    const Decision got = Decision::unpack(sent.pack());
    CHECK(got.generation == generation && got.aborted && got.reason == AbortReason::kError && got.rank == 255);
    CHECK(got.number == 0xFFFF);
  }
  Decision at;
  at.number = 0xFFFF;
  CHECK(at.covers(0xFFFF) && at.covers(0xFFFE) && !at.covers(0x10000));
  at.number = 0;
  CHECK(at.covers(0x10000) && at.covers(0xFFFF) && !at.covers(0x10001));
}

void a_process_is_known_by_pid_and_start() {
  const ProcessId me = this_process();
  CHECK(is_alive(me));
  CHECK(!is_alive({me.pid, me.start + 1}));
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  siginfo_t info;
  CHECK(::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT) == 0);
  CHECK(!is_alive({child, 0}));  // ended, though nobody has reaped it
  CHECK(::waitpid(child, nullptr, 0) == child);
  CHECK(!is_alive({child, 0}));
  CHECK(usable_processors() >= 1);
}

// One forked process a rank; cards travel through pipes.
void processes_map_each_other_and_notice_a_kill(Backing backing) {
  constexpr int kWorld = 3;
  int to_parent[kWorld][2];
  int to_child[kWorld][2];
  pid_t children[kWorld];
  struct Wire {
    std::int64_t pid;
    std::uint64_t start;
    std::uint64_t bytes;
    char address[32];
  };
  for (int rank = 0; rank < kWorld; ++rank) CHECK(::pipe(to_parent[rank]) == 0 && ::pipe(to_child[rank]) == 0);
  for (int rank = 0; rank < kWorld; ++rank) {
    children[rank] = ::fork();
    if (children[rank] != 0) continue;
    {
      Invitation invitation(rank, kWorld, 1 << 20, backing);
      const Card& card = invitation.card();
      Wire wire{card.process.pid, card.process.start, card.heap_bytes, {}};
      std::memcpy(wire.address, card.address.data(), 32);
      CHECK(::write(to_parent[rank][1], &wire, sizeof wire) == sizeof wire);
      std::vector<Card> cards;
      for (int peer = 0; peer < kWorld; ++peer) {
        CHECK(::read(to_child[rank][0], &wire, sizeof wire) == sizeof wire);
        cards.push_back({{wire.pid, wire.start}, wire.bytes, std::string(wire.address, 32)});
      }
      invitation.expect(cards);
      CHECK(invitation.progress(soon()));
      const auto heap = invitation.finish();
      const auto flag = heap->allocate(4, 64);
      barrier(*heap);
      heap->signal((rank + 1) % kWorld, *flag, 42, SignalOperation::kSet);
      CHECK(heap->wait_signal(*flag, 42, Comparison::kEq, soon()) == Status::kDone);
      barrier(*heap);
      if (rank == 1) ::kill(::getpid(), SIGKILL);
      CHECK(heap->wait_signal(*flag, 43, Comparison::kEq, Clock::now() + seconds(2)) == Status::kLost);
      CHECK(heap->lost_rank() == 1);
      heap->close();
      CHECK(heap->closed());
      if (backing == Backing::kMemfd) CHECK(heaps_mapped() == 0);
    }
    ::_exit(0);
  }
  std::vector<Wire> wires(kWorld);
  for (int rank = 0; rank < kWorld; ++rank) {
    CHECK(::read(to_parent[rank][0], &wires[static_cast<std::size_t>(rank)], sizeof(Wire)) == sizeof(Wire));
  }
  for (int rank = 0; rank < kWorld; ++rank) {
    for (const Wire& wire : wires) CHECK(::write(to_child[rank][1], &wire, sizeof wire) == sizeof wire);
  }
  for (int rank = 0; rank < kWorld; ++rank) {
    int status = 0;
    CHECK(::waitpid(children[rank], &status, 0) == children[rank]);
    if (rank == 1) {
      CHECK(WIFSIGNALED(status));
    } else {
      CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    for (const int end : {to_parent[rank][0], to_parent[rank][1], to_child[rank][0], to_child[rank][1]}) ::close(end);
  }
}

void an_invitation_names_who_is_gone() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  Invitation invitation(0, 2, 4096);
  Card ghost = invitation.card();
  ghost.process = {child, 0};
  ghost.address = std::string(32, '0');
  invitation.expect({invitation.card(), ghost});
  try {
    (void)invitation.progress(soon());
    CHECK(false);
  } catch (const ConnectError& error) {
    CHECK(error.rank == 1 && !error.dead);
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  try {
    (void)invitation.progress(soon());
    CHECK(false);
  } catch (const ConnectError& error) {
    CHECK(error.rank == 1 && error.dead);
  }
}

void memory_outlives_the_heap_and_then_goes() {
  const int before = heaps_mapped();
  std::shared_ptr<Mapping> kept;
  {
    SymmetricHeap heap(0, 1, 1 << 16);
    CHECK(reinterpret_cast<std::uintptr_t>(heap.base(0)) % kBaseAlignment == 0);
    kept = heap.memory(0);
    heap.close();
    CHECK(in_own_mapping(reinterpret_cast<std::uintptr_t>(kept->base()) + 100));
    CHECK(!in_own_mapping(reinterpret_cast<std::uintptr_t>(kept->base()) + kept->bytes()));
  }
  kept->base()[kHeaderBytes] = std::byte{1};
  CHECK(heaps_mapped() == before + 1);
  kept.reset();
  CHECK(heaps_mapped() == before && mappings_alive() == 0);
}

template <class Error, class Function>
void refused(Function function) {
  try {
    function();
  } catch (const Error&) {
    return;
  }
  CHECK(!"refused");
}

void what_leaves_the_heap_is_refused() {
  SymmetricHeap heap(0, 1, 4096);
  char byte = 0;
  refused<std::out_of_range>([&] { heap.put(0, 4096, &byte, 1); });
  refused<std::out_of_range>([&] { heap.get(0, ~std::uint64_t{0}, &byte, 2); });
  refused<std::out_of_range>([&] { heap.put(1, 0, &byte, 1); });
  refused<std::invalid_argument>([&] { heap.signal(0, 2, 1, SignalOperation::kSet); });
  refused<std::invalid_argument>([&] { (void)heap.allocate(1, 48); });
  refused<std::invalid_argument>([&] { SymmetricHeap(0, 1, 0); });
  refused<std::invalid_argument>([&] { SymmetricHeap(2, 2, 4096); });
  CHECK(!heap.allocate(~std::uint64_t{0}, 64));
  CHECK(heap.allocate(4096, 64) && !heap.allocate(1, 64));
}

}  // namespace

int main() {
  // Forks first, while this process has one thread.
  a_process_is_known_by_pid_and_start();
  processes_map_each_other_and_notice_a_kill(Backing::kMemfd);
  processes_map_each_other_and_notice_a_kill(Backing::kUnnamedFile);
  an_invitation_names_who_is_gone();
  memory_outlives_the_heap_and_then_goes();
  what_leaves_the_heap_is_refused();
  decisions_keep_their_fields_and_their_order();
  a_text_is_read_whole();
  rows_follow_signals_between_threads();
  collectives_are_all_or_none_under_aborts();
  a_deadline_and_a_wait_in_another_thread_end_with_an_abort();
  std::puts("ok");
  return 0;
}
