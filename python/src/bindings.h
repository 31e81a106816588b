// The parts of the module `_core`.
#pragma once

#include <cstdint>
#include <span>

#include "arrays.h"
#include "options.h"

namespace pagedkv::python {

void bind_formats(nb::module_& module);
void bind_cache(nb::module_& module);
void bind_block_arrays(nb::module_& module);

// How many parts pay: threads cost about as much as a few hundred thousand products.
int parts_for(int64_t products);
// The same for attention: query rows and lengths by sequence, products of one row with one key over all heads.
int attention_parts(std::span<const int32_t> query_start_loc, std::span<const int32_t> seq_lens,
                    int64_t products_a_key);

// Scale and window as Python gives them. Errors: TypeError, ValueError.
struct Scale {
  float factor = 0;  // None: 0, which is 1/sqrt(head_dim)
};
struct Window {
  int64_t keys = 0;  // None or -1: 0, which is all
};
void read(const Argument& argument, Scale& into);
void read(const Argument& argument, Window& into);

}  // namespace pagedkv::python
