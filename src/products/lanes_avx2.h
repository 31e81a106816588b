// What products need of AVX2 besides kernels/simd_avx2.h: one dword of eight rows to a register. See
// lanes_avx512.h.
#pragma once

namespace pagedkv::products::PKV_ISA {
namespace {

using namespace kernels::PKV_ISA;  // NOLINT(google-build-using-namespace): the wrapper of this instruction set

constexpr int kTileRows = 2;
constexpr bool kTilesPrefetch = false;  // where it was measured, it made no difference
constexpr int kTileColumns = 3;         // 2 x 3 sums, 2 x 3 results and 4 more fill 16 registers

PKV_INLINE void load_rows(const uint8_t* p, int64_t stride, Codes* x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const uint8_t* row = p + i * stride;
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + 4 * stride));
    x[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  transpose_dwords(x);
}

PKV_INLINE Codes masked(Codes x, int byte) { return _mm256_and_si256(x, _mm256_set1_epi8(char(byte))); }
PKV_INLINE Codes either(Codes a, Codes b) { return _mm256_or_si256(a, b); }
template <int n>
PKV_INLINE Codes right(Codes x) {
  return _mm256_srli_epi32(x, n);
}
template <int n>
PKV_INLINE Codes left(Codes x) {
  return _mm256_slli_epi32(x, n);
}
template <int n>
PKV_INLINE Codes right_signed(Codes x) {
  return _mm256_srai_epi32(x, n);
}
template <int nibble>
PKV_INLINE Codes fifth_bits(Codes bits) {
  constexpr char kByte = nibble / 2;
  const Codes bytes = _mm256_shuffle_epi8(
      bits, _mm256_broadcastsi128_si256(_mm_setr_epi8(kByte, kByte, kByte, kByte, kByte + 4, kByte + 4, kByte + 4,
                                                      kByte + 4, kByte + 8, kByte + 8, kByte + 8, kByte + 8,
                                                      kByte + 12, kByte + 12, kByte + 12, kByte + 12)));
  const __m256i bit = _mm256_set1_epi32(nibble % 2 == 0 ? 0x08040201 : int(0x80402010));
  return masked(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit), 16);
}

// Each byte of x, below 16, stands for one of the table.
PKV_INLINE Codes looked_up(const int8_t* table, Codes x) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table))),
                             x);
}

PKV_INLINE Vec f16_of_low(Codes x) {
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(words));
}
PKV_INLINE Vec f16_of_high(Codes x) { return f16_of_low(_mm256_srli_epi32(x, 16)); }
PKV_INLINE Codes load_dwords(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

PKV_INLINE void prefetch_soon(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
PKV_INLINE void store_from(float* p, int64_t first_lane, Vec v) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(int(first_lane) - 1)), v);
}

PKV_INLINE Codes pack(const Vec* v) {
  const __m256i low = _mm256_packs_epi32(_mm256_cvtps_epi32(v[0]), _mm256_cvtps_epi32(v[1]));
  const __m256i high = _mm256_packs_epi32(_mm256_cvtps_epi32(v[2]), _mm256_cvtps_epi32(v[3]));
  return _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
PKV_INLINE void sum_halves(Codes codes, int32_t* sums) {
  __m256i x = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
  x = _mm256_add_epi32(x, _mm256_shuffle_epi32(x, 0xb1));
  x = _mm256_add_epi32(x, _mm256_shuffle_epi32(x, 0x4e));
  sums[0] = _mm256_extract_epi32(x, 0);
  sums[1] = _mm256_extract_epi32(x, 4);
}

PKV_INLINE Ints repeat(int32_t x) { return _mm256_set1_epi32(x); }
PKV_INLINE Ints minus(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
PKV_INLINE Ints byte_products(Codes a, Codes b) { return _mm256_maddubs_epi16(a, b); }
PKV_INLINE Ints add_words(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
PKV_INLINE Ints add_pairs(Ints a, Ints words) {
  return _mm256_add_epi32(a, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
}
PKV_INLINE Vec as_vec(Ints x) { return _mm256_castsi256_ps(x); }
constexpr bool kByteDots = false;

}  // namespace
}  // namespace pagedkv::products::PKV_ISA
