// Products with AVX2 + FMA + F16C; empty where the compiler was not told to use them.
//
// No std code in here: the linker keeps one copy of an inline function, and it must not be this one.
#include "products/products.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#define PKV_ISA avx2
#include "kernels/simd_avx2.h"

#include "products/lanes_avx2.h"

#include "products/sum-inl.h"
#include "products/weights_k-inl.h"
// after both
#include "products/product-inl.h"

namespace pagedkv::products {

const IsaFunctions* avx2_functions() {
  static constexpr IsaFunctions kFunctions = {avx2::quantize_activations, avx2::product};
  return &kFunctions;
}

}  // namespace pagedkv::products

#else

namespace pagedkv::products {
const IsaFunctions* avx2_functions() { return nullptr; }
}  // namespace pagedkv::products

#endif
