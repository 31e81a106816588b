// Eight float lanes: AVX2, FMA, F16C. See simd_scalar.h for what each operation has to do.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define PKV_INLINE inline __attribute__((always_inline))

namespace pagedkv::kernels::PKV_ISA {
namespace {

constexpr int kLanes = 8;
constexpr int kAccs = 8;
using Vec = __m256;

PKV_INLINE Vec zero() { return _mm256_setzero_ps(); }
PKV_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
PKV_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
PKV_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
PKV_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
PKV_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
PKV_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
PKV_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
PKV_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
PKV_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
PKV_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
PKV_INLINE Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
PKV_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
PKV_INLINE Vec round_even(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PKV_INLINE Vec scale_pow2(Vec a, Vec n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
PKV_INLINE Vec scale_pow2_or_zero(Vec a, Vec n) {
  return select_less(n, set1(-126.0f), zero(), scale_pow2(a, max(n, set1(-126.0f))));
}
PKV_INLINE int count_less(Vec a, Vec b) {
  return __builtin_popcount(unsigned(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ))));
}
PKV_INLINE bool any_not_finite(Vec a) {
  return _mm256_movemask_ps(_mm256_cmp_ps(abs(a), _mm256_set1_ps(__builtin_inff()), _CMP_NLT_UQ)) != 0;
}

PKV_INLINE float reduce_max(Vec a) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
}

PKV_INLINE void reduce_max4(const Vec* a, float* top) {
  const __m256d ab = _mm256_castps_pd(max(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1])));
  const __m256d cd = _mm256_castps_pd(max(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3])));
  const Vec x = max(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
  _mm_storeu_ps(top, _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

// Lanes of half i of each: a0+a2, b0+b2, a1+a3, b1+b3.
PKV_INLINE Vec pair_sums(Vec a, Vec b) { return add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); }
// Half i: the sums of half i of a, b, c, d.
PKV_INLINE Vec half_sums(Vec a, Vec b, Vec c, Vec d) {
  const __m256d ab = _mm256_castps_pd(pair_sums(a, b)), cd = _mm256_castps_pd(pair_sums(c, d));
  return add(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
}
PKV_INLINE void reduce_accs(const Vec* a, float* sums) {
  const Vec x = half_sums(a[0], a[1], a[2], a[3]), y = half_sums(a[4], a[5], a[6], a[7]);
  store(sums, add(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31)));
}
PKV_INLINE void reduce_add4(const Vec* a, float* sums) {
  const Vec halves = half_sums(a[0], a[1], a[2], a[3]);
  _mm_storeu_ps(sums, _mm256_castps256_ps128(add(halves, _mm256_permute2f128_ps(halves, halves, 0x01))));
}

PKV_INLINE Vec load_f16(const uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PKV_INLINE Vec load_bf16(const uint8_t* p) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
PKV_INLINE Vec load_i8(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
PKV_INLINE void load_q4(const uint8_t* p, Vec* v) {
  const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i bias = _mm256_set1_epi32(8);
  v[0] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(x, _mm256_set1_epi32(15)), bias));
  v[1] = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(x, 4), bias));
}
// 6 bytes are 8 codes: three bytes to each half, four times, then shifted into place.
PKV_INLINE Vec load_q6(const uint8_t* p) {
  uint32_t low, high;  // two loads that overlap: not a byte past the six
  __builtin_memcpy(&low, p, 4);
  __builtin_memcpy(&high, p + 2, 4);
  const __m256i bytes = _mm256_broadcastsi128_si256(_mm_cvtsi64_si128(int64_t(uint64_t{high} << 16 | low)));
  const int x = -0x80000000;
  const int g0 = 0x00020100 | x, g1 = 0x00050403 | x;
  const __m256i spread = _mm256_setr_epi32(g0, g0, g0, g0, g1, g1, g1, g1);
  const __m256i shifts = _mm256_setr_epi32(0, 6, 12, 18, 0, 6, 12, 18);
  const __m256i codes =
      _mm256_and_si256(_mm256_srlv_epi32(_mm256_shuffle_epi8(bytes, spread), shifts), _mm256_set1_epi32(63));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(codes, _mm256_set1_epi32(32)));
}

PKV_INLINE void store_f16(uint8_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
PKV_INLINE void store_bf16(uint8_t* p, Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1)));
}
PKV_INLINE void store_i8(int8_t* p, Vec v) {
  const __m256i codes = _mm256_cvtps_epi32(v);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
PKV_INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// --- codes: 32 bytes, summed up in 8 int lanes -------------------------------------------------------------------

using Codes = __m256i;
using Ints = __m256i;
constexpr int kSignedBias = 0;
constexpr int kMaxWeight = 127;

PKV_INLINE Ints no_ints() { return _mm256_setzero_si256(); }
PKV_INLINE Codes load_codes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
PKV_INLINE void store_codes(uint8_t* p, Codes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
// Keeps a loaded value in its register: compilers load again for every use.
PKV_INLINE void hold(Codes& x) { asm("" : "+x"(x)); }
PKV_INLINE Codes repeat4(const uint8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return _mm256_set1_epi32(x);
}
PKV_INLINE Ints dot_unsigned(Ints sum, Codes a, Codes b) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
PKV_INLINE Ints dot_signed(Ints sum, Codes a, Codes b) {  // |a| times b with a's sign
  return dot_unsigned(sum, _mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
}

PKV_INLINE Codes prepare_signed(Codes a) { return a; }
PKV_INLINE Ints dot_prepared_signed(Ints sum, Codes a, Codes b) { return dot_signed(sum, a, b); }

PKV_INLINE Codes load_q8_codes(const uint8_t* p) { return load_codes(p); }
PKV_INLINE Codes load_q4_codes(const uint8_t* p) {
  const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_and_si256(_mm256_or_si256(words, _mm256_slli_epi16(words, 4)), _mm256_set1_epi8(15));
}
// 24 bytes are 32 codes: three bytes to each dword, then shifted into place.
PKV_INLINE Codes load_q6_codes(const uint8_t* p) {
  const __m256i halves = _mm256_set_m128i(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)),
                                          _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i x =
      _mm256_shuffle_epi8(halves, _mm256_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1,  //
                                                   4, 5, 6, -1, 7, 8, 9, -1, 10, 11, 12, -1, 13, 14, 15, -1));
  const __m256i low = _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi32(0x3f)),
                                      _mm256_and_si256(_mm256_slli_epi32(x, 2), _mm256_set1_epi32(0x3f00)));
  const __m256i high = _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi32(x, 4), _mm256_set1_epi32(0x3f0000)),
                                       _mm256_and_si256(_mm256_slli_epi32(x, 6), _mm256_set1_epi32(0x3f000000)));
  return _mm256_or_si256(low, high);
}

PKV_INLINE void transpose_dwords(Codes* x) {
  const __m256i ab0 = _mm256_unpacklo_epi32(x[0], x[1]), ab1 = _mm256_unpackhi_epi32(x[0], x[1]);
  const __m256i cd0 = _mm256_unpacklo_epi32(x[2], x[3]), cd1 = _mm256_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm256_unpacklo_epi64(ab0, cd0);
  x[1] = _mm256_unpackhi_epi64(ab0, cd0);
  x[2] = _mm256_unpacklo_epi64(ab1, cd1);
  x[3] = _mm256_unpackhi_epi64(ab1, cd1);
}
PKV_INLINE void zip_low(Codes* x) {
  const __m256i ab = _mm256_unpacklo_epi8(x[0], x[1]), cd = _mm256_unpacklo_epi8(x[2], x[3]);
  x[0] = _mm256_unpacklo_epi16(ab, cd);
  x[1] = _mm256_unpackhi_epi16(ab, cd);
}
PKV_INLINE void zip_high(Codes* x) {
  const __m256i ab = _mm256_unpackhi_epi8(x[0], x[1]), cd = _mm256_unpackhi_epi8(x[2], x[3]);
  x[0] = _mm256_unpacklo_epi16(ab, cd);
  x[1] = _mm256_unpackhi_epi16(ab, cd);
}
PKV_INLINE Ints add_shifted7(Ints a, Ints b) { return _mm256_add_epi32(_mm256_slli_epi32(a, 7), b); }
template <int c>
PKV_INLINE Codes spread_dword(Codes x) {
  return _mm256_shuffle_epi32(x, c * 0x55);
}
PKV_INLINE int32_t sum_ints(Ints x) {
  const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  const __m128i pair = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
  return _mm_cvtsi128_si32(_mm_add_epi32(pair, _mm_shuffle_epi32(pair, 1)));
}
PKV_INLINE Ints fold_quarters_of(const Ints* a) {
  return _mm256_add_epi32(_mm256_permute2x128_si256(a[0], a[1], 0x20), _mm256_permute2x128_si256(a[0], a[1], 0x31));
}
PKV_INLINE void transpose_quarters(Codes* x) {
  const __m256i low = _mm256_permute2x128_si256(x[0], x[1], 0x20);
  x[1] = _mm256_permute2x128_si256(x[0], x[1], 0x31);
  x[0] = low;
}
PKV_INLINE Vec to_floats(Ints x, int32_t less) {
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(x, _mm256_set1_epi32(less)));
}
PKV_INLINE void store_bytes(uint8_t* p, __m256i x) {
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(words, words));
}
PKV_INLINE void store_u8(uint8_t* p, Vec v) { store_bytes(p, _mm256_cvtps_epi32(v)); }
PKV_INLINE void store_u15(uint8_t* high, uint8_t* low, Vec v) {
  const __m256i x = _mm256_cvtps_epi32(v);
  store_bytes(high, _mm256_srli_epi32(x, 7));
  store_bytes(low, _mm256_and_si256(x, _mm256_set1_epi32(127)));
}
PKV_INLINE int32_t sum_u8(const uint8_t* p, int n) {
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 32)
    sum = _mm256_add_epi64(sum, _mm256_sad_epu8(load_codes(p + i), _mm256_setzero_si256()));
  const __m128i pair = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
  return int32_t(_mm_extract_epi64(pair, 0) + _mm_extract_epi64(pair, 1));
}

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
