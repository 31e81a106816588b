#include "gil.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <set>

#include "errors.h"

namespace pagedkv::python {
namespace {

// Never destroyed: caches may outlive the statics of this module.
struct Open {
  std::mutex mutex;
  std::set<ForkSafeMutex*> all;
};
Open& open_mutexes() {
  static Open* open = new Open;
  return *open;
}
std::atomic<int> forks{0};

void before_fork() {
  open_mutexes().mutex.lock();
  for (ForkSafeMutex* mutex : open_mutexes().all) mutex->lock();
}
void after_fork() {
  for (ForkSafeMutex* mutex : open_mutexes().all) mutex->unlock();
  open_mutexes().mutex.unlock();
}
[[maybe_unused]] const int kAtFork = pthread_atfork(before_fork, after_fork, [] {
  ++forks;
  after_fork();
});

// What f returns, which asks for the GIL, itself or as Python code does now and then. f is C: it has no objects
// that the unwinding of pthread_exit would destroy on its way here, where it ends.
template <class F>
auto or_stay(const F& f) {
  try {
    return f();
  } catch (...) {
    stay();
  }
}

}  // namespace

void stay() {
  for (;;) pause();
}

NoGil::~NoGil() {
  or_stay([this] { PyEval_RestoreThread(thread_); });
}

nb::object from_json(const std::string& text) {
  const auto made = [](PyObject* object) {
    if (object == nullptr) throw nb::python_error();
    return nb::steal(object);
  };
  const nb::object json = made(or_stay([] { return PyImport_ImportModule("json"); }));
  const nb::object loads = json.attr("loads"), given = nb::str(text.c_str(), text.size());
  return made(or_stay([&] { return PyObject_CallOneArg(loads.ptr(), given.ptr()); }));
}

ForkSafeMutex::ForkSafeMutex() {
  const std::scoped_lock lock(open_mutexes().mutex);
  open_mutexes().all.insert(this);
}
ForkSafeMutex::~ForkSafeMutex() {
  const std::scoped_lock lock(open_mutexes().mutex);
  open_mutexes().all.erase(this);
}

int n_forks() { return forks; }

void expect_leaks_of_lost_threads(nb::module_& module) {
  module.attr("_at_exit") = nb::cpp_function([] {
    if (forks > 0 || nb::len(nb::module_::import_("sys").attr("_current_frames")()) > 1)
      nb::set_leak_warnings(false);
  });
  nb::module_::import_("atexit").attr("register")(module.attr("_at_exit"));
}

}  // namespace pagedkv::python
