// The AVX-512 (F, BW, VL, DQ) entry; empty where the compiler was not told to use it.
//
// No std code in here: the linker keeps one copy of an inline function, and it must not be this one.
#include "kernels/isa.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#define PKV_ISA avx512
#include "kernels/simd_avx512.h"

#include "kernels/append-inl.h"
#include "kernels/attend-inl.h"

namespace pagedkv::kernels {

const IsaFunctions* avx512_functions() {
  static constexpr IsaFunctions kFunctions = {avx512::append,   avx512::attend,
                                              avx512::merge,    avx512::part_scratch_bytes,
                                              avx512::quantize, avx512::dequantize};
  return &kFunctions;
}

}  // namespace pagedkv::kernels

#else

namespace pagedkv::kernels {
const IsaFunctions* avx512_functions() { return nullptr; }
}  // namespace pagedkv::kernels

#endif
