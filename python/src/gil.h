// The GIL, forks, and threads that are still inside when the interpreter ends.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>
#include <string>

namespace pagedkv::python {

namespace nb = nanobind;

// Waits for ever, without the GIL: for a thread that an ending interpreter does not take back. Until 3.13 CPython
// ends such a thread where it asks for the GIL, which unwinds the C++ frames above and ends the process; from 3.14
// on it does what this does.
[[noreturn]] void stay();

// Gives the GIL up for a scope.
class NoGil {
 public:
  NoGil() : thread_(PyEval_SaveThread()) {}
  ~NoGil();
  NoGil(const NoGil&) = delete;

 private:
  PyThreadState* thread_;
};

// What f returns, computed without the GIL: f touches nothing of Python. Requires: the GIL.
template <class F>
auto without_gil(const F& f) {
  const NoGil released;
  return f();
}

// JSON as Python's objects. The reader is Python code, so other threads may run meanwhile.
nb::object from_json(const std::string& text);

// A mutex that a fork waits for: no thread is inside when the process is copied, and the child finds it open.
// Never held while waiting for another one, or for the GIL.
class ForkSafeMutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

// How many forks lie between the first process and this one: threads of before the last one are not here.
int n_forks();

// Threads that are left at the interpreter's exit, or that a fork left behind, keep their objects: no report of
// leaks then.
void expect_leaks_of_lost_threads(nb::module_& module);

}  // namespace pagedkv::python
