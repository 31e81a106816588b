// The threads that share out attention when it is called from Python.
#pragma once

#include <functional>

#include "pagedkv/status.h"

namespace pagedkv::python {

// Any thread. Default: the framework's OpenMP team if there is one, else the CPUs this process may run on.
// Requires: n >= 1.
int num_threads();
void set_num_threads(int n);

// Calls fn(part) for every part in [0, n_parts). Parts may run after each other on one thread, as when the threads
// are busy for somebody else. Returns the first error that a part met. fn must not throw. Must be called without
// the GIL.
Status run_parts(int n_parts, const std::function<Status(int)>& fn);

}  // namespace pagedkv::python
