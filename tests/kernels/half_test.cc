#include "tests/kernels/half.h"

#include <gtest/gtest.h>

#include <cmath>

namespace pagedkv {
namespace {

#ifdef __aarch64__
using CompilersHalf = __fp16;  // gcc 12 has no _Float16 in C++ there
#else
using CompilersHalf = _Float16;
#endif

TEST(Half, EveryF16BitPatternSurvivesTheWayThroughF32) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float f = f16_to_f32(uint16_t(h));
    if (std::isnan(f)) continue;
    EXPECT_EQ(f32_to_f16(f), uint16_t(h));
    EXPECT_EQ(f, float(static_cast<CompilersHalf>(f)));
  }
}

TEST(Half, RoundingIsToNearestEven) {
  uint32_t state = 7;
  for (int i = 0; i < 200000; ++i) {
    state = state * 1664525u + 1013904223u;
    const float f = std::bit_cast<float>(state);
    if (std::isnan(f)) continue;
    EXPECT_EQ(f32_to_f16(f), std::bit_cast<uint16_t>(static_cast<CompilersHalf>(f))) << f;
  }
  EXPECT_EQ(bf16_to_f32(f32_to_bf16(1.00390625f)), 1.0f);       // half way, to even
  EXPECT_EQ(bf16_to_f32(f32_to_bf16(1.01171875f)), 1.015625f);  // half way, to even
  EXPECT_EQ(bf16_to_f32(f32_to_bf16(-3.0f)), -3.0f);
}

}  // namespace
}  // namespace pagedkv
