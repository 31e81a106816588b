// What products need of AVX-512 besides kernels/simd_avx512.h: one dword of sixteen rows to a register.
// lanes_avx2.h has the same operations for eight.
#pragma once

namespace pagedkv::products::PKV_ISA {
namespace {

using namespace kernels::PKV_ISA;  // NOLINT(google-build-using-namespace): the wrapper of this instruction set

constexpr int kTileRows = 2;  // registers of rows in a panel
constexpr bool kTilesPrefetch = true;
constexpr int kTileColumns = 6;  // tokens of a tile: 2 x 6 sums, 2 x 6 results and 4 more fill 32 registers

// 16 bytes of each of the rows p, p + stride, ...: x[i] has dword i, row r in lane r.
PKV_INLINE void load_rows(const uint8_t* p, int64_t stride, Codes* x) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const uint8_t* row = p + i * stride;
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
    const auto at = [&](int n) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + n * stride)); };
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, at(4));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, at(8));
    x[i] = _mm512_mask_broadcast_i32x4(v, 0xf000, at(12));
  }
  transpose_dwords(x);
}

PKV_INLINE Codes masked(Codes x, int byte) { return _mm512_and_si512(x, _mm512_set1_epi8(char(byte))); }
PKV_INLINE Codes either(Codes a, Codes b) { return _mm512_or_si512(a, b); }
template <int n>
PKV_INLINE Codes right(Codes x) {  // by dwords, as left()
  return _mm512_srli_epi32(x, n);
}
template <int n>
PKV_INLINE Codes left(Codes x) {
  return _mm512_slli_epi32(x, n);
}
template <int n>
PKV_INLINE Codes right_signed(Codes x) {
  return _mm512_srai_epi32(x, n);
}
// Bits 4 * nibble ... + 3 of each dword of `bits`, as bit 4 of the four bytes.
template <int nibble>
PKV_INLINE Codes fifth_bits(Codes bits) {
  constexpr char kByte = nibble / 2;
  const Codes bytes = _mm512_shuffle_epi8(
      bits, _mm512_broadcast_i32x4(_mm_setr_epi8(kByte, kByte, kByte, kByte, kByte + 4, kByte + 4, kByte + 4,
                                                 kByte + 4, kByte + 8, kByte + 8, kByte + 8, kByte + 8, kByte + 12,
                                                 kByte + 12, kByte + 12, kByte + 12)));
  const __mmask64 set =
      _mm512_test_epi8_mask(bytes, _mm512_set1_epi32(nibble % 2 == 0 ? 0x08040201 : int(0x80402010)));
  return _mm512_maskz_mov_epi8(set, _mm512_set1_epi8(16));
}

PKV_INLINE Codes looked_up(const int8_t* table, Codes x) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table))), x);
}

PKV_INLINE Vec f16_of_low(Codes x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }
PKV_INLINE Vec f16_of_high(Codes x) { return f16_of_low(_mm512_srli_epi32(x, 16)); }
PKV_INLINE Codes load_dwords(const uint32_t* p) { return _mm512_loadu_si512(p); }

PKV_INLINE void prefetch_soon(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
// Lanes first_lane and up.
PKV_INLINE void store_from(float* p, int64_t first_lane, Vec v) {
  _mm512_mask_storeu_ps(p, __mmask16(0xffffU << first_lane), v);
}

// Four registers of integers from -128 to 127, rounded to nearest even, as codes one after another.
PKV_INLINE Codes pack(const Vec* v) {
  const __m512i low = _mm512_packs_epi32(_mm512_cvtps_epi32(v[0]), _mm512_cvtps_epi32(v[1]));
  const __m512i high = _mm512_packs_epi32(_mm512_cvtps_epi32(v[2]), _mm512_cvtps_epi32(v[3]));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high));
}
// Sums of 16 codes each, of 64.
PKV_INLINE void sum_halves(Codes codes, int32_t* sums) {
  const __m512i words = _mm512_maddubs_epi16(_mm512_set1_epi8(1), codes);
  __m512i x = _mm512_madd_epi16(words, _mm512_set1_epi16(1));
  x = _mm512_add_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_ENUM(0xb1)));
  x = _mm512_add_epi32(x, _mm512_shuffle_epi32(x, _MM_PERM_ENUM(0x4e)));
  const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(sums), _mm512_castsi512_si128(_mm512_permutexvar_epi32(first, x)));
}

PKV_INLINE Ints repeat(int32_t x) { return _mm512_set1_epi32(x); }
PKV_INLINE Ints minus(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
// Of 16-bit integers: products of neighbouring bytes, the first unsigned, added; sums; sums of neighbours, added to
// a.
PKV_INLINE Ints byte_products(Codes a, Codes b) { return _mm512_maddubs_epi16(a, b); }
PKV_INLINE Ints add_words(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
PKV_INLINE Ints add_pairs(Ints a, Ints words) {
  return _mm512_add_epi32(a, _mm512_madd_epi16(words, _mm512_set1_epi16(1)));
}
PKV_INLINE Vec as_vec(Ints x) { return _mm512_castsi512_ps(x); }
#if defined(__AVX512VNNI__)
constexpr bool kByteDots = true;  // four bytes at once, into 32 bits: dot_unsigned
#else
constexpr bool kByteDots = false;
#endif

}  // namespace
}  // namespace pagedkv::products::PKV_ISA
