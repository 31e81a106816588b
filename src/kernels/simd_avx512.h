// Sixteen float lanes: AVX-512 F, BW, VL, DQ.
//
// The wrapper of an instruction set: about 30 operations, all that the kernels (*-inl.h) know of it. See
// simd_scalar.h for what each has to do.
#pragma once

// gcc 12 takes the header's own _mm512_undefined_ps() for a mistake (its bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wunknown-warning-option"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>

#define PKV_INLINE inline __attribute__((always_inline))

namespace pagedkv::kernels::PKV_ISA {
namespace {

constexpr int kLanes = 16;  // floats of a Vec
constexpr int kAccs = 16;   // Vecs that one register block accumulates into
using Vec = __m512;

PKV_INLINE Vec zero() { return _mm512_setzero_ps(); }
PKV_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
PKV_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
PKV_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
PKV_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
PKV_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
PKV_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
PKV_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
PKV_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
PKV_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PKV_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
PKV_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
PKV_INLINE Vec select_less(Vec a, Vec b, Vec yes, Vec no) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
PKV_INLINE Vec round_even(Vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
PKV_INLINE Vec scale_pow2(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
// Also for n far below -126, where the product may be 0.
PKV_INLINE Vec scale_pow2_or_zero(Vec a, Vec n) { return _mm512_scalef_ps(a, n); }
PKV_INLINE int count_less(Vec a, Vec b) { return __builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)); }
PKV_INLINE bool any_not_finite(Vec a) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(a), _mm512_set1_ps(__builtin_inff()), _CMP_NLT_UQ) != 0;
}

PKV_INLINE float reduce_max(Vec a) { return _mm512_reduce_max_ps(a); }
// The maxima of four.
PKV_INLINE void reduce_max4(const Vec* a, float* top) {
  const __m512d ab = _mm512_castps_pd(max(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1])));
  const __m512d cd = _mm512_castps_pd(max(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3])));
  const Vec x = max(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  _mm_storeu_ps(top, _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
}

// Lanes of quarter i of each: a0+a2, b0+b2, a1+a3, b1+b3.
PKV_INLINE Vec pair_sums(Vec a, Vec b) { return add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); }
// Quarter i: the sums of quarter i of a, b, c, d.
PKV_INLINE Vec quarter_sums(Vec a, Vec b, Vec c, Vec d) {
  const __m512d ab = _mm512_castps_pd(pair_sums(a, b)), cd = _mm512_castps_pd(pair_sums(c, d));
  return add(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
}
// Quarters of a, then of b: q0+q1, q2+q3.
PKV_INLINE Vec fold_quarters(Vec a, Vec b) {
  return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
PKV_INLINE void reduce_accs(const Vec* a, float* sums) {
  const Vec q0 = quarter_sums(a[0], a[1], a[2], a[3]), q1 = quarter_sums(a[4], a[5], a[6], a[7]);
  const Vec q2 = quarter_sums(a[8], a[9], a[10], a[11]), q3 = quarter_sums(a[12], a[13], a[14], a[15]);
  store(sums, fold_quarters(fold_quarters(q0, q1), fold_quarters(q2, q3)));
}
// The sums of four, each by the same tree.
PKV_INLINE void reduce_add4(const Vec* a, float* sums) {
  const Vec quarters = quarter_sums(a[0], a[1], a[2], a[3]);
  const Vec halves = fold_quarters(quarters, quarters);
  _mm_storeu_ps(sums, _mm512_castps512_ps128(fold_quarters(halves, halves)));
}

PKV_INLINE Vec load_f16(const uint8_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PKV_INLINE Vec load_bf16(const uint8_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
PKV_INLINE Vec load_i8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// 16 bytes are 32 codes. The permute looks at 4 index bits alone, so it takes the bytes as they are.
PKV_INLINE void load_q4(const uint8_t* p, Vec* v) {
  const Vec table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  v[0] = _mm512_permutexvar_ps(x, table);
  v[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(x, 4), table);
}
// 12 bytes are 16 codes: three bytes to each quarter, four times, then shifted into place.
PKV_INLINE Vec load_q6(const uint8_t* p) {
  const __m512i bytes = _mm512_broadcast_i32x4(_mm_maskz_loadu_epi8(0x0fff, p));
  const int x = -0x80000000;
  const int g0 = 0x00020100 | x, g1 = 0x00050403 | x, g2 = 0x00080706 | x, g3 = 0x000b0a09 | x;
  const __m512i spread = _mm512_setr_epi32(g0, g0, g0, g0, g1, g1, g1, g1, g2, g2, g2, g2, g3, g3, g3, g3);
  const __m512i shifts = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 6, 12, 18));
  const __m512i codes =
      _mm512_and_si512(_mm512_srlv_epi32(_mm512_shuffle_epi8(bytes, spread), shifts), _mm512_set1_epi32(63));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(32)));
}

PKV_INLINE void store_f16(uint8_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
PKV_INLINE void store_bf16(uint8_t* p, Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
PKV_INLINE void store_i8(int8_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
PKV_INLINE void prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// --- codes: 64 bytes, summed up in 16 int lanes ------------------------------------------------------------------

using Codes = __m512i;
using Ints = __m512i;

PKV_INLINE Ints no_ints() { return _mm512_setzero_si512(); }
PKV_INLINE Codes load_codes(const uint8_t* p) { return _mm512_loadu_si512(p); }
PKV_INLINE void store_codes(uint8_t* p, Codes x) { _mm512_storeu_si512(p, x); }
// Keeps a loaded value in its register: compilers load again for every use.
PKV_INLINE void hold(Codes& x) { asm("" : "+v"(x)); }
PKV_INLINE Codes repeat4(const uint8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, sizeof x);
  return _mm512_set1_epi32(x);
}

#if defined(__AVX512VNNI__)
constexpr int kSignedBias = 128;
constexpr int kMaxWeight = 255;
PKV_INLINE Ints dot_unsigned(Ints sum, Codes a, Codes b) { return _mm512_dpbusd_epi32(sum, a, b); }
PKV_INLINE Ints dot_signed(Ints sum, Codes a, Codes b) {
  return _mm512_dpbusd_epi32(sum, _mm512_xor_si512(a, _mm512_set1_epi8(-128)), b);
}
PKV_INLINE Codes prepare_signed(Codes a) { return _mm512_xor_si512(a, _mm512_set1_epi8(-128)); }
PKV_INLINE Ints dot_prepared_signed(Ints sum, Codes a, Codes b) { return dot_unsigned(sum, a, b); }
#else
constexpr int kSignedBias = 0;
constexpr int kMaxWeight = 127;
PKV_INLINE Ints dot_unsigned(Ints sum, Codes a, Codes b) {
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
}
PKV_INLINE Ints dot_signed(Ints sum, Codes a, Codes b) {  // |a| times b with a's sign
  const Codes signed_b = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
  return dot_unsigned(sum, _mm512_abs_epi8(a), signed_b);
}
PKV_INLINE Codes prepare_signed(Codes a) { return a; }
PKV_INLINE Ints dot_prepared_signed(Ints sum, Codes a, Codes b) { return dot_signed(sum, a, b); }
#endif

PKV_INLINE Codes load_q8_codes(const uint8_t* p) { return load_codes(p); }
PKV_INLINE Codes spread_q4(__m256i x) {  // byte k to bytes 2k (low nibble) and 2k+1 (high nibble)
  const __m512i words = _mm512_cvtepu8_epi16(x);
  return _mm512_and_si512(_mm512_or_si512(words, _mm512_slli_epi16(words, 4)), _mm512_set1_epi8(15));
}
PKV_INLINE Codes load_q4_codes(const uint8_t* p) {
  return spread_q4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// 48 bytes are 64 codes: six bytes to each group of eight codes, then shifted into place.
PKV_INLINE Codes load_q6_codes(const uint8_t* p) {
  const __m512i bytes = _mm512_maskz_loadu_epi8(~uint64_t{0} >> 16, p);
#if defined(__AVX512VBMI__)
  const __m512i places =
      _mm512_set_epi64(0x00002f2e2d2c2b2a, 0x0000292827262524, 0x0000232221201f1e, 0x00001d1c1b1a1918,
                       0x0000171615141312, 0x000011100f0e0d0c, 0x00000b0a09080706, 0x0000050403020100);
  const __m512i groups = _mm512_permutexvar_epi8(places, bytes);
  const __m512i shifts = _mm512_set1_epi64(0x2a241e18120c0600);
  return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, groups), _mm512_set1_epi8(63));
#else
  // Twelve bytes to each quarter, three to each dword.
  const __m512i quarters =
      _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11), bytes);
  const __m512i x = _mm512_shuffle_epi8(
      quarters, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1, 9, 10, 11, -1)));
  const __m512i low = _mm512_or_si512(_mm512_and_si512(x, _mm512_set1_epi32(0x3f)),
                                      _mm512_and_si512(_mm512_slli_epi32(x, 2), _mm512_set1_epi32(0x3f00)));
  const __m512i high = _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi32(x, 4), _mm512_set1_epi32(0x3f0000)),
                                       _mm512_and_si512(_mm512_slli_epi32(x, 6), _mm512_set1_epi32(0x3f000000)));
  return _mm512_or_si512(low, high);
#endif
}

PKV_INLINE void transpose_dwords(Codes* x) {
  const __m512i ab0 = _mm512_unpacklo_epi32(x[0], x[1]), ab1 = _mm512_unpackhi_epi32(x[0], x[1]);
  const __m512i cd0 = _mm512_unpacklo_epi32(x[2], x[3]), cd1 = _mm512_unpackhi_epi32(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi64(ab0, cd0);
  x[1] = _mm512_unpackhi_epi64(ab0, cd0);
  x[2] = _mm512_unpacklo_epi64(ab1, cd1);
  x[3] = _mm512_unpackhi_epi64(ab1, cd1);
}
PKV_INLINE void zip_low(Codes* x) {
  const __m512i ab = _mm512_unpacklo_epi8(x[0], x[1]), cd = _mm512_unpacklo_epi8(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi16(ab, cd);
  x[1] = _mm512_unpackhi_epi16(ab, cd);
}
PKV_INLINE void zip_high(Codes* x) {
  const __m512i ab = _mm512_unpackhi_epi8(x[0], x[1]), cd = _mm512_unpackhi_epi8(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi16(ab, cd);
  x[1] = _mm512_unpackhi_epi16(ab, cd);
}
PKV_INLINE Ints add_shifted7(Ints a, Ints b) { return _mm512_add_epi32(_mm512_slli_epi32(a, 7), b); }
// Dword c of each quarter, four times.
template <int c>
PKV_INLINE Codes spread_dword(Codes x) {
  return _mm512_shuffle_epi32(x, _MM_PERM_ENUM(c * 0x55));
}
PKV_INLINE int32_t sum_ints(Ints x) { return _mm512_reduce_add_epi32(x); }
PKV_INLINE Ints fold_pair(Ints a, Ints b) {
  return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
}
PKV_INLINE Ints fold_quarters_of(const Ints* a) { return fold_pair(fold_pair(a[0], a[1]), fold_pair(a[2], a[3])); }
// Quarter j of x[i] goes to quarter i of x[j].
PKV_INLINE void transpose_quarters(Codes* x) {
  const __m512i ab0 = _mm512_shuffle_i32x4(x[0], x[1], 0x88), ab1 = _mm512_shuffle_i32x4(x[0], x[1], 0xdd);
  const __m512i cd0 = _mm512_shuffle_i32x4(x[2], x[3], 0x88), cd1 = _mm512_shuffle_i32x4(x[2], x[3], 0xdd);
  x[0] = _mm512_shuffle_i32x4(ab0, cd0, 0x88);
  x[2] = _mm512_shuffle_i32x4(ab0, cd0, 0xdd);
  x[1] = _mm512_shuffle_i32x4(ab1, cd1, 0x88);
  x[3] = _mm512_shuffle_i32x4(ab1, cd1, 0xdd);
}
PKV_INLINE Vec to_floats(Ints x, int32_t less) {
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(x, _mm512_set1_epi32(less)));
}
PKV_INLINE void store_u8(uint8_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(v)));
}
PKV_INLINE void store_u15(uint8_t* high, uint8_t* low, Vec v) {
  const __m512i x = _mm512_cvtps_epi32(v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 7)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(low),
                   _mm512_cvtepi32_epi8(_mm512_and_si512(x, _mm512_set1_epi32(127))));
}
PKV_INLINE int32_t sum_u8(const uint8_t* p, int n) {  // n: a multiple of 64
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < n; i += 64)
    sum = _mm512_add_epi64(sum, _mm512_sad_epu8(load_codes(p + i), _mm512_setzero_si512()));
  return int32_t(_mm512_reduce_add_epi64(sum));
}

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
