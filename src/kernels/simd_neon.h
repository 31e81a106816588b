// Four float lanes: AArch64's Advanced SIMD, which every such CPU has. See simd_scalar.h for what each operation
// has to do. vmaxq and vminq hand a NaN on where the others take b; a row with a NaN is NaN either way.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#define PKV_INLINE inline __attribute__((always_inline))

namespace pagedkv::kernels::PKV_ISA {
namespace {

constexpr int kLanes = 4;
constexpr int kAccs = 16;  // of 32 registers, like AVX-512
using Vec = float32x4_t;

PKV_INLINE Vec zero() { return vdupq_n_f32(0); }
PKV_INLINE Vec set1(float x) { return vdupq_n_f32(x); }
PKV_INLINE Vec iota() { return Vec{0, 1, 2, 3}; }
PKV_INLINE Vec load(const float* p) { return vld1q_f32(p); }
PKV_INLINE void store(float* p, Vec v) { vst1q_f32(p, v); }
PKV_INLINE Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
PKV_INLINE Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
PKV_INLINE Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
PKV_INLINE Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
PKV_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
PKV_INLINE Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
PKV_INLINE Vec min(Vec a, Vec b) { return vminq_f32(a, b); }
PKV_INLINE Vec abs(Vec a) { return vabsq_f32(a); }
PKV_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }
PKV_INLINE Vec round_even(Vec a) { return vrndnq_f32(a); }
PKV_INLINE Vec scale_pow2(Vec a, Vec n) {
  const int32x4_t exponent = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
  return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}
PKV_INLINE int count_less(Vec a, Vec b) { return int(vaddvq_u32(vshrq_n_u32(vcltq_f32(a, b), 31))); }
PKV_INLINE bool any_not_finite(Vec a) { return vminvq_u32(vcltq_f32(abs(a), set1(__builtin_inff()))) == 0; }

PKV_INLINE float reduce_max(Vec a) { return vmaxvq_f32(a); }

// a0+a2, b0+b2, a1+a3, b1+b3.
PKV_INLINE Vec pair_sums(Vec a, Vec b) { return add(vzip1q_f32(a, b), vzip2q_f32(a, b)); }
// The sums of a, b, c, d.
PKV_INLINE Vec quad_sums(Vec a, Vec b, Vec c, Vec d) {
  const float64x2_t ab = vreinterpretq_f64_f32(pair_sums(a, b)), cd = vreinterpretq_f64_f32(pair_sums(c, d));
  return add(vreinterpretq_f32_f64(vzip1q_f64(ab, cd)), vreinterpretq_f32_f64(vzip2q_f64(ab, cd)));
}
PKV_INLINE void reduce_accs(const Vec* a, float* sums) {
#pragma GCC unroll 4
  for (int i = 0; i < kAccs; i += 4) store(sums + i, quad_sums(a[i], a[i + 1], a[i + 2], a[i + 3]));
}
PKV_INLINE float reduce_add(Vec a) { return vpadds_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a))); }

PKV_INLINE Vec load_f16(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
PKV_INLINE Vec load_bf16(const uint8_t* p) {
  return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}
PKV_INLINE uint8x8_t load_four(const uint8_t* p) {  // and four zeros
  uint32_t bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return vcreate_u8(bytes);
}
PKV_INLINE Vec load_i8(const uint8_t* p) {
  const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(load_four(p)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
}
// 4 bytes are 8 codes.
PKV_INLINE void load_q4(const uint8_t* p, Vec* v) {
  const uint32x4_t x = vmovl_u16(vget_low_u16(vmovl_u8(load_four(p))));
  const int32x4_t even = vreinterpretq_s32_u32(vandq_u32(x, vdupq_n_u32(15)));
  const int32x4_t odd = vreinterpretq_s32_u32(vshrq_n_u32(x, 4));
  v[0] = vcvtq_f32_s32(vsubq_s32(even, vdupq_n_s32(8)));
  v[1] = vcvtq_f32_s32(vsubq_s32(odd, vdupq_n_s32(8)));
}
// 3 bytes are 4 codes: the same bits in every lane, shifted into place.
PKV_INLINE Vec load_q6(const uint8_t* p) {
  uint16_t low;
  __builtin_memcpy(&low, p, sizeof low);
  const int32x4_t right = {0, -6, -12, -18};
  const uint32x4_t codes = vandq_u32(vshlq_u32(vdupq_n_u32(low | uint32_t{p[2]} << 16), right), vdupq_n_u32(63));
  return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(codes), vdupq_n_s32(32)));
}

PKV_INLINE void store_f16(uint8_t* p, Vec v) { vst1_u8(p, vreinterpret_u8_f16(vcvt_f16_f32(v))); }
PKV_INLINE void store_bf16(uint8_t* p, Vec v) {
  const uint32x4_t bits = vreinterpretq_u32_f32(v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  vst1_u8(p, vreinterpret_u8_u16(vshrn_n_u32(rounded, 16)));
}
PKV_INLINE void store_i8(int8_t* p, Vec v) {
  const int16x4_t words = vmovn_s32(vcvtq_s32_f32(v));
  const int8x8_t codes = vmovn_s16(vcombine_s16(words, words));
  __builtin_memcpy(p, &codes, kLanes);
}
PKV_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
