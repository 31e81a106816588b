// What each instruction set's unit hands to the table in entries.cc.
#pragma once

#include "kernels/kernels.h"

namespace pagedkv::kernels {

struct IsaFunctions {
  decltype(Entry::append) append;
  decltype(Entry::attend) attend;
  decltype(Entry::merge) merge;
  decltype(Entry::part_scratch_bytes) part_scratch_bytes;
  decltype(Entry::quantize) quantize;
  decltype(Entry::dequantize) dequantize;
};

// Null where this build does not have it.
const IsaFunctions* scalar_functions();
const IsaFunctions* avx2_functions();
const IsaFunctions* avx512_functions();
const IsaFunctions* avx512_vnni_functions();
const IsaFunctions* neon_functions();

}  // namespace pagedkv::kernels
