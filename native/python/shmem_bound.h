// The Python handle of a symmetric heap, shared by the bindings that take one.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "hyper_mpmd/shmem_heap.h"

namespace hyper_mpmd::shmem {

namespace nb = nanobind;

inline constexpr std::chrono::milliseconds kSlice{50};

// How a wait ended; the values of Status and one more.
inline constexpr int kInterrupted = 4;

inline Clock::time_point deadline_in(double seconds) {
  constexpr double kLongest = 1e8;  // three years; keeps the sum inside the clock
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongest)));
}

// Counts the calls that run without the GIL, so that a close cannot unmap under them.
class Bound {
 public:
  struct Use {
    explicit Use(Bound& bound) : bound(bound) { ++bound.uses_; }
    ~Use() { --bound.uses_; }
    Bound& bound;
  };

  explicit Bound(std::unique_ptr<SymmetricHeap> heap) : heap_(std::move(heap)) {}

  SymmetricHeap& heap() const { return *heap_; }

  template <class Call>
  auto without_gil(Call call) {
    const Use use(*this);
    const nb::gil_scoped_release released;
    return call(*heap_);
  }

  // `attempt(until)` again and again until it is something else than pending, the deadline, or a signal's handler
  // raised. Then the pending exception is left to the caller, who ends the group first.
  template <class Attempt>
  int wait(double seconds, Attempt attempt) {
    const Use use(*this);
    const auto deadline = deadline_in(seconds);
    while (true) {
      Status status;
      Clock::time_point now;
      {
        const nb::gil_scoped_release released;
        status = attempt(*heap_, std::min(deadline, Clock::now() + kSlice));
        now = Clock::now();
      }
      if (status != Status::kPending) return static_cast<int>(status);
      if (PyErr_CheckSignals() != 0) {
        raised_ = nb::steal<nb::object>(PyErr_GetRaisedExceptionCompat());
        return kInterrupted;
      }
      if (now >= deadline) return static_cast<int>(Status::kPending);
    }
  }

  nb::object take_raised() { return std::exchange(raised_, nb::none()); }

  bool close() {
    if (uses_ > 0) return false;
    heap_->close();
    return true;
  }

 private:
  static PyObject* PyErr_GetRaisedExceptionCompat() {
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != nullptr) PyException_SetTraceback(value, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
#endif
  }

  std::unique_ptr<SymmetricHeap> heap_;
  std::atomic<int> uses_{0};
  nb::object raised_ = nb::none();
};

}  // namespace hyper_mpmd::shmem
