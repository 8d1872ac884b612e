// Bindings of the symmetric heap. Waits run without the GIL in slices short enough for Ctrl-C to be heard; everything
// else is one call each. Which error a status becomes is decided in Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <tuple>

#include "bind.h"
#include "hyper_mpmd/shmem_connect.h"
#include "hyper_mpmd/shmem_process.h"
#include "shmem_bound.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace hyper_mpmd::shmem {

namespace {

// Bytes of this rank's heap as a torch tensor that keeps the mapping alive, whatever becomes of the heap.
nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>, nb::device::cpu> view(Bound& bound, std::uint64_t offset,
                                                                          std::uint64_t bytes) {
  SymmetricHeap& heap = bound.heap();
  if (bytes > heap.heap_bytes() || offset > heap.heap_bytes() - bytes) throw std::out_of_range("view leaves the heap");
  auto* kept = new std::shared_ptr<Mapping>(heap.memory(heap.rank()));
  const nb::capsule owner(kept, [](void* held) noexcept { delete static_cast<std::shared_ptr<Mapping>*>(held); });
  return {heap.base(heap.rank()) + offset, {static_cast<std::size_t>(bytes)}, owner};
}

}  // namespace

void bind(nb::module_& m) {
  m.attr("SHMEM_MAX_ALIGNMENT") = kBaseAlignment;
  m.attr("SHMEM_MAX_RANKS") = kMaxRanks;
  m.attr("SHMEM_MAX_HEAP_BYTES") = kMaxHeapBytes;
  m.attr("SHMEM_HEADER_BYTES") = kHeaderBytes;
  m.attr("SHMEM_ABORT_TEXT_BYTES") = 8 * kAbortTextWords;
  m.attr("SHMEM_INTERRUPTED") = kInterrupted;
  m.def("shmem_in_own_mapping", &in_own_mapping, "address"_a);
  m.def("shmem_mappings_alive", &mappings_alive);
  m.def("usable_processors", &usable_processors);
  m.def("process_identity", [] {
    const ProcessId process = this_process();
    return std::pair(process.pid, process.start);
  });
  m.def(
      "process_alive", [](std::int64_t pid, std::uint64_t start) { return is_alive({pid, start}); }, "pid"_a,
      "start"_a);

  nb::class_<OffsetAllocator>(m, "ShmemAllocator")
      .def(nb::init<std::uint64_t>(), "capacity"_a)
      .def("allocate", &OffsetAllocator::allocate, "nbytes"_a, "alignment"_a)
      .def("free", &OffsetAllocator::free, "offset"_a)
      .def("capacity_needed", &OffsetAllocator::capacity_needed, "nbytes"_a, "alignment"_a)
      .def_prop_ro("capacity", &OffsetAllocator::capacity)
      .def_prop_ro("used", &OffsetAllocator::used)
      .def_prop_ro("peak", &OffsetAllocator::peak)
      .def_prop_ro("live", &OffsetAllocator::live)
      .def_prop_ro("largest_free", &OffsetAllocator::largest_free);

  nb::class_<Bound>(m, "ShmemHeap")
      .def_prop_ro("rank", [](Bound& b) { return b.heap().rank(); })
      .def_prop_ro("world", [](Bound& b) { return b.heap().world(); })
      .def_prop_ro("heap_bytes", [](Bound& b) { return b.heap().heap_bytes(); })
      .def_prop_ro("closed", [](Bound& b) { return b.heap().closed(); })
      .def_prop_ro("generation", [](Bound& b) { return b.heap().generation(); })
      .def_prop_ro("collectives", [](Bound& b) { return b.heap().collectives(); })
      .def_prop_ro("used", [](Bound& b) { return b.heap().allocator().used(); })
      .def_prop_ro("peak", [](Bound& b) { return b.heap().allocator().peak(); })
      .def_prop_ro("largest_free", [](Bound& b) { return b.heap().allocator().largest_free(); })
      .def("capacity_needed",
           [](Bound& b, std::uint64_t bytes, std::uint64_t alignment) {
             return b.heap().allocator().capacity_needed(bytes, alignment);
           })
      .def("process",
           [](Bound& b, int peer) {
             const ProcessId& process = b.heap().process(peer);
             return std::pair(process.pid, process.start);
           })
      .def("address", [](Bound& b, int peer) { return reinterpret_cast<std::uintptr_t>(b.heap().base(peer)); })
      .def("view", &view, "offset"_a, "nbytes"_a)
      .def("allocate",
           [](Bound& b, std::uint64_t bytes, std::uint64_t alignment) {
             return b.without_gil([&](SymmetricHeap& h) { return h.allocate(bytes, alignment); });
           })
      .def("free",
           [](Bound& b, std::uint64_t offset, std::uint64_t bytes) {
             return b.without_gil([&](SymmetricHeap& h) { return h.free(offset, bytes); });
           })
      .def("put",
           [](Bound& b, int peer, std::uint64_t offset, std::uintptr_t source, std::uint64_t bytes) {
             b.without_gil([&](SymmetricHeap& h) { h.put(peer, offset, reinterpret_cast<void*>(source), bytes); });
           })
      .def("get",
           [](Bound& b, int peer, std::uint64_t offset, std::uintptr_t target, std::uint64_t bytes) {
             b.without_gil([&](SymmetricHeap& h) { h.get(peer, offset, reinterpret_cast<void*>(target), bytes); });
           })
      .def("signal",
           [](Bound& b, int peer, std::uint64_t offset, std::int32_t value, bool add) {
             b.heap().signal(peer, offset, value, add ? SignalOperation::kAdd : SignalOperation::kSet);
           })
      .def("read_signal", [](Bound& b, int peer, std::uint64_t offset) { return b.heap().read_signal(peer, offset); })
      .def("wait_signal",
           [](Bound& b, std::uint64_t offset, std::int32_t value, int comparison, double seconds) {
             return b.wait(seconds, [=](SymmetricHeap& h, Clock::time_point until) {
               return h.wait_signal(offset, value, static_cast<Comparison>(comparison), until);
             });
           })
      .def("enter",
           [](Bound& b, int kind, std::uint64_t a, std::uint64_t arg, bool refused, const std::string& text) {
             return b.heap().enter(static_cast<Collective>(kind), a, arg, refused, text);
           })
      .def("wait_all",
           [](Bound& b, std::uint64_t number, double seconds) {
             return b.wait(seconds,
                           [=](SymmetricHeap& h, Clock::time_point until) { return h.wait_all(number, until); });
           })
      .def("has_entered", [](Bound& b, int peer, std::uint64_t number) { return b.heap().has_entered(peer, number); })
      .def("entry",
           [](Bound& b, int peer, std::uint64_t number) {
             const Entry entry = b.heap().entry(peer, number);
             return std::tuple(static_cast<int>(entry.kind), entry.refused, entry.a, entry.b, entry.text);
           })
      .def(
          "abort",
          [](Bound& b, int reason, const std::string& text, std::optional<std::uint64_t> number) {
            return static_cast<int>(b.heap().abort(static_cast<AbortReason>(reason), text, number));
          },
          "reason"_a, "text"_a, "number"_a = nb::none())
      .def("abort_state",
           [](Bound& b) -> std::optional<std::tuple<int, int, std::string>> {
             const auto state = b.heap().abort_state();
             if (!state) return std::nullopt;
             return std::tuple(state->rank, static_cast<int>(state->reason), state->text);
           })
      .def("meet",
           [](Bound& b, double seconds) {
             return b.wait(seconds, [](SymmetricHeap& h, Clock::time_point until) { return h.meet(until); });
           })
      .def("has_met", [](Bound& b, int peer) { return b.heap().has_met(peer); })
      .def("is_quiet",
           [](Bound& b) {
             SymmetricHeap& heap = b.heap();
             return !heap.closed() && !heap.aborted() && heap.poll_peers() < 0;
           })
      .def("poll_peers", [](Bound& b) { return b.heap().poll_peers(); })
      .def("lost_rank", [](Bound& b) { return b.heap().lost_rank(); })
      .def("set_activity", [](Bound& b, const std::string& text) { b.heap().set_activity(text); })
      .def("activity", [](Bound& b, int peer) { return b.heap().activity(peer); })
      .def("take_raised", &Bound::take_raised)
      .def("close", &Bound::close, "False when another thread is inside a call.");

  nb::class_<Invitation>(m, "ShmemInvitation")
      .def(
          "__init__",
          [](Invitation* self, int rank, int world, std::uint64_t heap_bytes, bool unnamed_file) {
            new (self) Invitation(rank, world, heap_bytes, unnamed_file ? Backing::kUnnamedFile : Backing::kMemfd);
          },
          "rank"_a, "world"_a, "heap_bytes"_a, "unnamed_file"_a = false)
      .def_prop_ro("card",
                   [](Invitation& self) {
                     const Card& card = self.card();
                     return std::tuple(card.process.pid, card.process.start, card.heap_bytes, card.address);
                   })
      .def("expect",
           [](Invitation& self,
              const std::vector<std::tuple<std::int64_t, std::uint64_t, std::uint64_t, std::string>>& cards) {
             std::vector<Card> all;
             for (const auto& [pid, start, bytes, address] : cards) all.push_back({{pid, start}, bytes, address});
             self.expect(std::move(all));
           })
      .def("progress",
           [](Invitation& self, double seconds) {
             const nb::gil_scoped_release released;
             return self.progress(deadline_in(seconds));
           })
      .def("missing", &Invitation::missing)
      .def("abandon", &Invitation::abandon)
      .def("finish", [](Invitation& self, bool may_spin) {
        auto heap = self.finish();
        heap->set_may_spin(may_spin);
        return new Bound(std::move(heap));
      });

  static PyObject* connect_error =
      PyErr_NewException("hyper_mpmd._native.ShmemConnectError", PyExc_RuntimeError, nullptr);
  m.attr("ShmemConnectError") = nb::handle(connect_error);
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const ConnectError& error) {
      const nb::object args = nb::make_tuple(error.rank, error.dead, error.what());
      PyErr_SetObject(connect_error, args.ptr());
    } catch (const std::system_error& error) {
      const nb::object args = nb::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, args.ptr());
    }
  });
}

}  // namespace hyper_mpmd::shmem

void hyper_mpmd::bind_shmem(nb::module_& m) { hyper_mpmd::shmem::bind(m); }
