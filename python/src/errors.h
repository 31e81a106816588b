// Statuses of the library as Python exceptions, and its notices as warnings.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>

#include "gil.h"
#include "pagedkv/status.h"

namespace pagedkv::python {

namespace nb = nanobind;

// Takes the notices of the library that is linked into this module over. Once per module.
void take_notices();

// Raises the exception of pagedkv/errors.py that belongs to `status`. Requires: the GIL.
[[noreturn]] void raise(const Status& status);
[[noreturn]] void raise_type_error(const std::string& message);

inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}
template <class T>
T check(Result<T> result) {
  if (!result.ok()) raise(result.status());
  return std::move(result).value();
}

// Hands notices that came in meanwhile to `warnings.warn`. The sink itself only keeps them: it may run on any
// thread, without the GIL and inside our locks. Requires: the GIL.
void warn_of_notices();

}  // namespace pagedkv::python
