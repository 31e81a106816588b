// The parts of the module `_core`.
#pragma once

#include <cstdint>
#include <span>

#include "arrays.h"

namespace pagedkv::python {

void bind_formats(nb::module_& module);
void bind_cache(nb::module_& module);
void bind_block_arrays(nb::module_& module);

// How many parts pay: threads cost about as much as a few hundred thousand products.
int parts_for(int64_t products);
// The same for attention: query rows and lengths by sequence, products of one row with one key over all heads.
int attention_parts(std::span<const int32_t> query_start_loc, std::span<const int32_t> seq_lens,
                    int64_t products_a_key);

// Window and scale as Python gives them. Errors: ValueError.
float scale_of(nb::handle scale);              // None: 0, which is 1/sqrt(head_dim)
int64_t window_of(nb::handle sliding_window);  // None or -1: 0, which is none

}  // namespace pagedkv::python
