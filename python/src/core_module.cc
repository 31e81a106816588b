// The extension module `pagedkv._core`: the library, without the engine.

#include "bindings.h"
#include "cache.h"
#include "errors.h"

NB_MODULE(_core, m) {
  m.doc() = "The C++ side of pagedkv: use the package `pagedkv`.";
  pagedkv::python::take_notices();
  pagedkv::python::expect_leaks_of_lost_threads(m);
  pagedkv::python::bind_formats(m);
  pagedkv::python::bind_cache(m);
  pagedkv::python::bind_plans(m);
  pagedkv::python::bind_block_arrays(m);
}
