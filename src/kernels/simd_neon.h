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
PKV_INLINE Vec scale_pow2_or_zero(Vec a, Vec n) {
  return select_less(n, set1(-126.0f), zero(), scale_pow2(a, max(n, set1(-126.0f))));
}
PKV_INLINE int count_less(Vec a, Vec b) { return int(vaddvq_u32(vshrq_n_u32(vcltq_f32(a, b), 31))); }
PKV_INLINE bool any_not_finite(Vec a) { return vminvq_u32(vcltq_f32(abs(a), set1(__builtin_inff()))) == 0; }

PKV_INLINE float reduce_max(Vec a) { return vmaxvq_f32(a); }

PKV_INLINE void reduce_max4(const Vec* a, float* top) {
  for (int i = 0; i < 4; ++i) top[i] = vmaxvq_f32(a[i]);
}

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
PKV_INLINE void reduce_add4(const Vec* a, float* sums) { store(sums, quad_sums(a[0], a[1], a[2], a[3])); }

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

// --- codes: 16 bytes, summed up in 4 int lanes -------------------------------------------------------------------

using Codes = uint8x16_t;
using Ints = int32x4_t;
constexpr int kSignedBias = 0;
constexpr int kMaxWeight = 127;

PKV_INLINE Ints no_ints() { return vdupq_n_s32(0); }
PKV_INLINE Codes load_codes(const uint8_t* p) { return vld1q_u8(p); }
PKV_INLINE void store_codes(uint8_t* p, Codes x) { vst1q_u8(p, x); }
// Keeps a loaded value in its register: compilers load again for every use.
PKV_INLINE void hold(Codes& x) { asm("" : "+w"(x)); }
PKV_INLINE Codes repeat4(const uint8_t* p) {
  uint32_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return vreinterpretq_u8_u32(vdupq_n_u32(x));
}
PKV_INLINE Ints dot_words(Ints sum, int16x8_t low, int16x8_t high) {  // eight products each
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
PKV_INLINE Ints dot_signed(Ints sum, Codes a, Codes b) {
  const int8x16_t x = vreinterpretq_s8_u8(a), y = vreinterpretq_s8_u8(b);
  return dot_words(sum, vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y));
}
PKV_INLINE Ints dot_unsigned(Ints sum, Codes a, Codes b) {
  const int8x16_t y = vreinterpretq_s8_u8(b);
  const int16x8_t a_low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(a)));
  const int16x8_t a_high = vreinterpretq_s16_u16(vmovl_high_u8(a));
  return dot_words(sum, vmulq_s16(a_low, vmovl_s8(vget_low_s8(y))), vmulq_s16(a_high, vmovl_high_s8(y)));
}

PKV_INLINE Codes prepare_signed(Codes a) { return a; }
PKV_INLINE Ints dot_prepared_signed(Ints sum, Codes a, Codes b) { return dot_signed(sum, a, b); }

PKV_INLINE Codes load_q8_codes(const uint8_t* p) { return load_codes(p); }
PKV_INLINE Codes load_q4_codes(const uint8_t* p) {
  const uint8x8_t x = vld1_u8(p);
  const uint8x8_t low = vand_u8(x, vdup_n_u8(15)), high = vshr_n_u8(x, 4);
  return vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
}
// 12 bytes are 16 codes: three bytes to each dword, then shifted into place.
PKV_INLINE Codes load_q6_codes(const uint8_t* p) {
  const uint8x16_t bytes = vcombine_u8(vld1_u8(p), load_four(p + 8));
  const uint8x16_t places = {0, 1, 2, 255, 3, 4, 5, 255, 6, 7, 8, 255, 9, 10, 11, 255};
  const uint32x4_t x = vreinterpretq_u32_u8(vqtbl1q_u8(bytes, places));
  const uint32x4_t low =
      vorrq_u32(vandq_u32(x, vdupq_n_u32(0x3f)), vandq_u32(vshlq_n_u32(x, 2), vdupq_n_u32(0x3f00)));
  const uint32x4_t high = vorrq_u32(vandq_u32(vshlq_n_u32(x, 4), vdupq_n_u32(0x3f0000)),
                                    vandq_u32(vshlq_n_u32(x, 6), vdupq_n_u32(0x3f000000)));
  return vreinterpretq_u8_u32(vorrq_u32(low, high));
}

PKV_INLINE void transpose_dwords(Codes* x) {
  const uint32x4_t a = vreinterpretq_u32_u8(x[0]), b = vreinterpretq_u32_u8(x[1]);
  const uint32x4_t c = vreinterpretq_u32_u8(x[2]), d = vreinterpretq_u32_u8(x[3]);
  const uint64x2_t ab0 = vreinterpretq_u64_u32(vzip1q_u32(a, b)), ab1 = vreinterpretq_u64_u32(vzip2q_u32(a, b));
  const uint64x2_t cd0 = vreinterpretq_u64_u32(vzip1q_u32(c, d)), cd1 = vreinterpretq_u64_u32(vzip2q_u32(c, d));
  x[0] = vreinterpretq_u8_u64(vzip1q_u64(ab0, cd0));
  x[1] = vreinterpretq_u8_u64(vzip2q_u64(ab0, cd0));
  x[2] = vreinterpretq_u8_u64(vzip1q_u64(ab1, cd1));
  x[3] = vreinterpretq_u8_u64(vzip2q_u64(ab1, cd1));
}
PKV_INLINE void zip_words(uint8x16_t ab, uint8x16_t cd, Codes* x) {
  const uint16x8_t low = vreinterpretq_u16_u8(ab), high = vreinterpretq_u16_u8(cd);
  x[0] = vreinterpretq_u8_u16(vzip1q_u16(low, high));
  x[1] = vreinterpretq_u8_u16(vzip2q_u16(low, high));
}
PKV_INLINE void zip_low(Codes* x) { zip_words(vzip1q_u8(x[0], x[1]), vzip1q_u8(x[2], x[3]), x); }
PKV_INLINE void zip_high(Codes* x) { zip_words(vzip2q_u8(x[0], x[1]), vzip2q_u8(x[2], x[3]), x); }
PKV_INLINE Ints add_shifted7(Ints a, Ints b) { return vaddq_s32(vshlq_n_s32(a, 7), b); }
template <int c>
PKV_INLINE Codes spread_dword(Codes x) {
  return vreinterpretq_u8_u32(vdupq_laneq_u32(vreinterpretq_u32_u8(x), c));
}
PKV_INLINE int32_t sum_ints(Ints x) { return vaddvq_s32(x); }
PKV_INLINE Ints fold_quarters_of(const Ints* a) { return a[0]; }
PKV_INLINE void transpose_quarters(Codes*) {}
PKV_INLINE Vec to_floats(Ints x, int32_t less) { return vcvtq_f32_s32(vsubq_s32(x, vdupq_n_s32(less))); }
PKV_INLINE void store_bytes(uint8_t* p, uint32x4_t x) {
  const uint16x4_t words = vmovn_u32(x);
  const uint8x8_t codes = vmovn_u16(vcombine_u16(words, words));
  __builtin_memcpy(p, &codes, kLanes);
}
PKV_INLINE void store_u8(uint8_t* p, Vec v) { store_bytes(p, vcvtnq_u32_f32(v)); }
PKV_INLINE void store_u15(uint8_t* high, uint8_t* low, Vec v) {
  const uint32x4_t x = vcvtnq_u32_f32(v);
  store_bytes(high, vshrq_n_u32(x, 7));
  store_bytes(low, vandq_u32(x, vdupq_n_u32(127)));
}
PKV_INLINE int32_t sum_u8(const uint8_t* p, int n) {
  uint32x4_t sum = vdupq_n_u32(0);
  for (int i = 0; i < n; i += 16) sum = vpadalq_u16(sum, vpaddlq_u8(vld1q_u8(p + i)));
  return int32_t(vaddvq_u32(sum));
}

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
