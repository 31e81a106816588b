// Four float lanes in the compiler's own vector type: what every CPU has. A product and its sum are rounded
// separately. The comments here define the operations for every wrapper.
#pragma once

#include <cstdint>

#define PKV_INLINE inline __attribute__((always_inline))

namespace pagedkv::kernels::PKV_ISA {
namespace {

constexpr int kLanes = 4;  // floats of a Vec; kTileTokens is a multiple
constexpr int kAccs = 8;   // Vecs that one register block accumulates into: 8 or 16
using Vec = float __attribute__((vector_size(16)));
using IntVec = int32_t __attribute__((vector_size(16)));
using BitVec = uint32_t __attribute__((vector_size(16)));

PKV_INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
PKV_INLINE Vec zero() { return set1(0); }
PKV_INLINE Vec load(const float* p) {  // no alignment is asked of any load or store
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
PKV_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }
PKV_INLINE Vec add(Vec a, Vec b) { return a + b; }
PKV_INLINE Vec sub(Vec a, Vec b) { return a - b; }
PKV_INLINE Vec mul(Vec a, Vec b) { return a * b; }
PKV_INLINE Vec div(Vec a, Vec b) { return a / b; }
PKV_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }  // one rounding where the hardware can
// a < b ? yes : no, lane by lane; no where either is NaN.
PKV_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  const IntVec mask = a < b;
  return Vec((mask & IntVec(yes)) | (~mask & IntVec(no)));
}
PKV_INLINE Vec max(Vec a, Vec b) { return select_less(b, a, a, b); }
PKV_INLINE Vec min(Vec a, Vec b) { return select_less(a, b, a, b); }
PKV_INLINE Vec abs(Vec a) { return Vec(BitVec(a) & 0x7fffffffu); }
// To the nearest integer, ties to even. Requires: |a| < 2^22.
PKV_INLINE Vec round_even(Vec a) {
  const Vec magic = set1(0x1.8p23f);
  return (a + magic) - magic;
}
// a * 2^n. Requires: n is integer-valued in [-126, 127].
PKV_INLINE Vec scale_pow2(Vec a, Vec n) {
  const IntVec exponent = __builtin_convertvector(n, IntVec) + 127;
  return a * Vec(exponent << 23);
}
// Also for n far below -126, where the product is 0.
PKV_INLINE Vec scale_pow2_or_zero(Vec a, Vec n) {
  return select_less(n, set1(-126.0f), zero(), scale_pow2(a, max(n, set1(-126.0f))));
}
PKV_INLINE int count_less(Vec a, Vec b) {  // lanes with a < b
  const IntVec mask = a < b;
  return -(mask[0] + mask[1] + mask[2] + mask[3]);
}
PKV_INLINE bool any_not_finite(Vec a) { return count_less(abs(a), set1(__builtin_inff())) != kLanes; }
PKV_INLINE float reduce_max(Vec a) {
  const float x = a[0] < a[1] ? a[1] : a[0], y = a[2] < a[3] ? a[3] : a[2];
  return x < y ? y : x;
}

// The maxima of four.
PKV_INLINE void reduce_max4(const Vec* a, float* top) {
  for (int i = 0; i < 4; ++i) top[i] = reduce_max(a[i]);
}

// a0+a2, b0+b2, a1+a3, b1+b3.
PKV_INLINE Vec pair_sums(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
}
PKV_INLINE Vec quad_sums(Vec a, Vec b, Vec c, Vec d) {
  const Vec ab = pair_sums(a, b), cd = pair_sums(c, d);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
// sums[i] = the sum of the lanes of a[i], for kAccs of them: one tree for all, whatever else is in the block.
PKV_INLINE void reduce_accs(const Vec* a, float* sums) {
  store(sums, quad_sums(a[0], a[1], a[2], a[3]));
  store(sums + 4, quad_sums(a[4], a[5], a[6], a[7]));
}
PKV_INLINE void reduce_add4(const Vec* a, float* sums) { store(sums, quad_sums(a[0], a[1], a[2], a[3])); }

// kLanes elements of each format as floats: exact, except that q formats come without their scale.
PKV_INLINE Vec load_f16(const uint8_t* p) {
  uint16_t h[4];
  __builtin_memcpy(h, p, sizeof h);
  const BitVec bits = {h[0], h[1], h[2], h[3]};
  const BitVec magnitude = (bits & 0x7fffu) << 13;
  const Vec finite = Vec(magnitude) * 0x1p112f;  // moves the exponent's bias, and makes subnormals normal
  const BitVec special = BitVec(magnitude >= (0x7c00u << 13)) & 0x7f800000u;
  return Vec(BitVec(finite) | special | ((bits & 0x8000u) << 16));
}
PKV_INLINE Vec load_bf16(const uint8_t* p) {
  uint16_t h[4];
  __builtin_memcpy(h, p, sizeof h);
  return Vec(BitVec{h[0], h[1], h[2], h[3]} << 16);
}
PKV_INLINE Vec load_i8(const uint8_t* p) {
  return __builtin_convertvector((IntVec{int8_t(p[0]), int8_t(p[1]), int8_t(p[2]), int8_t(p[3])}), Vec);
}
// kLanes bytes are 2 * kLanes codes: v[0] the even ones, v[1] the odd ones.
PKV_INLINE void load_q4(const uint8_t* p, Vec* v) {
  const IntVec x = {p[0], p[1], p[2], p[3]};
  v[0] = __builtin_convertvector((x & 15) - 8, Vec);
  v[1] = __builtin_convertvector((x >> 4) - 8, Vec);
}
// kLanes * 3 / 4 bytes are kLanes codes; not a byte more is read.
PKV_INLINE Vec load_q6(const uint8_t* p) {
  const int32_t bits = p[0] | p[1] << 8 | p[2] << 16;
  const IntVec codes = IntVec{bits, bits >> 6, bits >> 12, bits >> 18} & 63;
  return __builtin_convertvector(codes - 32, Vec);
}

// Rounded to nearest even. Requires: finite, and inside the format's range.
PKV_INLINE void store_f16(uint8_t* p, Vec v) {
  const BitVec bits = BitVec(v);
  const BitVec magnitude = bits & 0x7fffffffu;
  const BitVec normal = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  const BitVec subnormal = BitVec(Vec(magnitude) + 0.5f) - 0x3f000000u;  // the FPU rounds at 2^-24
  const BitVec small = BitVec(magnitude < 0x38800000u);
  const BitVec half = (small & subnormal) | (~small & normal) | ((bits >> 16) & 0x8000u);
  const uint16_t h[4] = {uint16_t(half[0]), uint16_t(half[1]), uint16_t(half[2]), uint16_t(half[3])};
  __builtin_memcpy(p, h, sizeof h);
}
PKV_INLINE void store_bf16(uint8_t* p, Vec v) {
  const BitVec bits = BitVec(v);
  const BitVec half = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint16_t h[4] = {uint16_t(half[0]), uint16_t(half[1]), uint16_t(half[2]), uint16_t(half[3])};
  __builtin_memcpy(p, h, sizeof h);
}
// Requires: integer-valued in [-128, 127].
PKV_INLINE void store_i8(int8_t* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i] = int8_t(v[i]);
}
PKV_INLINE void prefetch(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

// --- codes: 4 * kLanes bytes, summed up four by four in kLanes integers ------------------------------------------

using Codes = uint8_t __attribute__((vector_size(16)));
using Ints = IntVec;
constexpr int kSignedBias = 0;   // dot_signed multiplies (a + kSignedBias) with b
constexpr int kMaxWeight = 127;  // largest a whose products with -127 .. 127 dot_unsigned adds without loss

PKV_INLINE Ints no_ints() { return Ints{}; }
PKV_INLINE Codes load_codes(const uint8_t* p) {
  Codes x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
PKV_INLINE void store_codes(uint8_t* p, Codes x) { __builtin_memcpy(p, &x, sizeof x); }
PKV_INLINE void hold(Codes&) {}
PKV_INLINE Codes repeat4(const uint8_t* p) {
  return Codes{p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3], p[0], p[1], p[2], p[3]};
}
// sum[i] += a[4i .. 4i+3] . b[4i .. 4i+3]; b is signed, a is or is not.
PKV_INLINE Ints dot_unsigned(Ints sum, Codes a, Codes b) {
  for (int i = 0; i < 16; ++i) sum[i / 4] += int32_t(a[i]) * int8_t(b[i]);
  return sum;
}
PKV_INLINE Ints dot_signed(Ints sum, Codes a, Codes b) {
  for (int i = 0; i < 16; ++i) sum[i / 4] += int32_t(int8_t(a[i])) * int8_t(b[i]);
  return sum;
}

// dot_signed in two steps: what of it needs a alone, and the rest.
PKV_INLINE Codes prepare_signed(Codes a) { return a; }
PKV_INLINE Ints dot_prepared_signed(Ints sum, Codes a, Codes b) { return dot_signed(sum, a, b); }

// The next 16 codes of a row as they are stored.
PKV_INLINE Codes load_q8_codes(const uint8_t* p) { return load_codes(p); }
PKV_INLINE Codes load_q4_codes(const uint8_t* p) {
  Codes x;
  for (int i = 0; i < 16; ++i) x[i] = uint8_t(p[i / 2] >> (i % 2 * 4) & 15);
  return x;
}
PKV_INLINE Codes load_q6_codes(const uint8_t* p) {
  Codes x;
  for (int i = 0; i < 16; ++i) {
    const uint8_t* group = p + i / 4 * 3;
    x[i] = uint8_t((group[0] | group[1] << 8 | group[2] << 16) >> (i % 4 * 6) & 63);
  }
  return x;
}

// In each quarter (16 bytes): dword j of x[i] goes to dword i of x[j].
PKV_INLINE void transpose_dwords(Codes* x) {
  uint8_t in[64], out[64];
  __builtin_memcpy(in, x, sizeof in);
  for (int i = 0; i < 64; ++i) out[i / 4 % 4 * 16 + i / 16 * 4 + i % 4] = in[i];
  __builtin_memcpy(x, out, sizeof out);
}
// In each quarter: byte 4c + j of x[i] goes to byte 4j + i of x[c]; for c = 0, 1.
PKV_INLINE void zip_bytes(Codes* x, int first) {
  uint8_t in[64], out[32];
  __builtin_memcpy(in, x, sizeof in);
  for (int i = 0; i < 32; ++i) out[i] = in[i % 4 * 16 + first + i / 4];
  __builtin_memcpy(x, out, sizeof out);
}
PKV_INLINE void zip_low(Codes* x) { zip_bytes(x, 0); }
// The same for c = 2, 3, which go to x[0] and x[1].
PKV_INLINE void zip_high(Codes* x) { zip_bytes(x, 8); }
PKV_INLINE Ints add_shifted7(Ints a, Ints b) { return Ints(BitVec(a) << 7) + b; }  // 128 a + b, wrapping
// Dword c of each quarter, four times.
template <int c>
PKV_INLINE Codes spread_dword(Codes x) {
  Codes y;
  for (int i = 0; i < 16; ++i) y[i] = x[4 * c + i % 4];
  return y;
}
PKV_INLINE int32_t sum_ints(Ints x) { return x[0] + x[1] + x[2] + x[3]; }
// Quarter i of the result: the sum of a[i]'s quarters. kLanes / 4 of them.
PKV_INLINE Ints fold_quarters_of(const Ints* a) { return a[0]; }
// Quarter j of x[i] goes to quarter i of x[j]. kLanes / 4 of them.
PKV_INLINE void transpose_quarters(Codes*) {}
PKV_INLINE Vec to_floats(Ints x, int32_t less) { return __builtin_convertvector(x - less, Vec); }
PKV_INLINE void store_u8(uint8_t* p, Vec v) {  // 0 to 255, to nearest even
  for (int i = 0; i < kLanes; ++i) p[i] = uint8_t(__builtin_lrintf(v[i]));
}
// The same for 15 bits: 128 * high + low.
PKV_INLINE void store_u15(uint8_t* high, uint8_t* low, Vec v) {
  for (int i = 0; i < kLanes; ++i) {
    const long x = __builtin_lrintf(v[i]);
    high[i] = uint8_t(x >> 7);
    low[i] = uint8_t(x & 127);
  }
}
PKV_INLINE int32_t sum_u8(const uint8_t* p, int n) {  // n: a multiple of 4 * kLanes
  int32_t sum = 0;
  for (int i = 0; i < n; ++i) sum += p[i];
  return sum;
}

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
