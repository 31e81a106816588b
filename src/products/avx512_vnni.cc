// Products with AVX-512 with VNNI and VBMI; empty where the compiler was not told to use them.
//
// No std code in here: the linker keeps one copy of an inline function, and it must not be this one.
#include "products/products.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__) && defined(__AVX512VBMI__)

#define PKV_ISA avx512_vnni
#include "kernels/simd_avx512.h"

#include "products/lanes_avx512.h"

#include "products/sum-inl.h"
#include "products/weights_k-inl.h"
// after both
#include "products/product-inl.h"

namespace pagedkv::products {

const IsaFunctions* avx512_vnni_functions() {
  static constexpr IsaFunctions kFunctions = {avx512_vnni::quantize_activations, avx512_vnni::product};
  return &kFunctions;
}

}  // namespace pagedkv::products

#else

namespace pagedkv::products {
const IsaFunctions* avx512_vnni_functions() { return nullptr; }
}  // namespace pagedkv::products

#endif
