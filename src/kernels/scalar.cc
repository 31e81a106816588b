// The entry that runs everywhere.
//
// No std code in here: the linker keeps one copy of an inline function, and it must not be this one.
#include "kernels/isa.h"

#define PKV_ISA scalar
#include "kernels/simd_scalar.h"

#include "kernels/append-inl.h"
#include "kernels/attend-inl.h"

namespace pagedkv::kernels {

const IsaFunctions* scalar_functions() {
  static constexpr IsaFunctions kFunctions = {scalar::append,   scalar::attend,
                                              scalar::merge,    scalar::part_scratch_bytes,
                                              scalar::quantize, scalar::dequantize};
  return &kFunctions;
}

}  // namespace pagedkv::kernels
