// The NEON entry; empty where the compiler does not build for AArch64.
//
// No std code in here: the linker keeps one copy of an inline function, and it must not be this one.
#include "kernels/isa.h"

#if defined(__aarch64__) && defined(__ARM_NEON)

#define PKV_ISA neon
#include "kernels/simd_neon.h"

#include "kernels/append-inl.h"
#include "kernels/attend-inl.h"

namespace pagedkv::kernels {

const IsaFunctions* neon_functions() {
  static constexpr IsaFunctions kFunctions = {
      neon::append, neon::attend, neon::merge, neon::part_scratch_bytes, neon::quantize, neon::dequantize};
  return &kFunctions;
}

}  // namespace pagedkv::kernels

#else

namespace pagedkv::kernels {
const IsaFunctions* neon_functions() { return nullptr; }
}  // namespace pagedkv::kernels

#endif
