// The AVX-512 entry with VNNI and VBMI (Ice Lake, Zen 4 and later); empty where the compiler was not told to use
// them.
//
// No std code in here: the linker keeps one copy of an inline function, and it must not be this one.
#include "kernels/isa.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#define PKV_ISA avx512_vnni
#include "kernels/simd_avx512.h"

#include "kernels/append-inl.h"
#include "kernels/attend-inl.h"

namespace pagedkv::kernels {

const IsaFunctions* avx512_vnni_functions() {
  static constexpr IsaFunctions kFunctions = {avx512_vnni::append,   avx512_vnni::attend,
                                              avx512_vnni::merge,    avx512_vnni::part_scratch_bytes,
                                              avx512_vnni::quantize, avx512_vnni::dequantize};
  return &kFunctions;
}

}  // namespace pagedkv::kernels

#else

namespace pagedkv::kernels {
const IsaFunctions* avx512_vnni_functions() { return nullptr; }
}  // namespace pagedkv::kernels

#endif
