// The AVX2 + FMA + F16C entry; empty where the compiler was not told to use them.
//
// No std code in here: the linker keeps one copy of an inline function, and it must not be this one.
#include "kernels/isa.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#define PKV_ISA avx2
#include "kernels/simd_avx2.h"

#include "kernels/append-inl.h"
#include "kernels/attend-inl.h"

namespace pagedkv::kernels {

const IsaFunctions* avx2_functions() {
  static constexpr IsaFunctions kFunctions = {
      avx2::append, avx2::attend, avx2::merge, avx2::part_scratch_bytes, avx2::quantize, avx2::dequantize};
  return &kFunctions;
}

}  // namespace pagedkv::kernels

#else

namespace pagedkv::kernels {
const IsaFunctions* avx2_functions() { return nullptr; }
}  // namespace pagedkv::kernels

#endif
