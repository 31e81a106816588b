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

PKV_INLINE Vec to_vec(Ints x) { return _mm512_cvtepi32_ps(x); }
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

// The sum of some products of dwords of codes. max_code: the largest code of the weights; 0: they are signed and
// went through prepare_signed.
template <int max_code>
class Sum {
 public:
  PKV_INLINE void start() { wide_ = _mm512_set1_epi32(kZero); }
  // At what `offset`, a power of two, adds too much to products with codes of this sum.
  template <int offset>
  PKV_INLINE void start_below(int32_t sum_of_codes) {
    constexpr int kShift = __builtin_ctz(offset);
    wide_ = _mm512_sub_epi32(_mm512_set1_epi32(kZero), _mm512_slli_epi32(_mm512_set1_epi32(sum_of_codes), kShift));
  }
  // k: counts the calls since start(), of n.
  PKV_INLINE void add(int k, int n, Codes w, Codes x) {
#if defined(__AVX512VNNI__)
    static_cast<void>(k), static_cast<void>(n);
    wide_ = _mm512_dpbusd_epi32(wide_, w, x);
#else
    if constexpr (max_code == 0) {
      static_cast<void>(k), static_cast<void>(n);
      wide_ = dot_prepared_signed(wide_, w, x);
      hold(wide_);  // or the compiler adds in pairs, and keeps all products at once
    } else {        // 16-bit sums as long as they cannot overflow
      constexpr int kSteps = 32767 / (2 * 127 * max_code);
      const __m512i words = _mm512_maddubs_epi16(w, x);
      narrow_ = k % kSteps == 0 ? words : _mm512_add_epi16(narrow_, words);
      hold(narrow_);
      if (k % kSteps == kSteps - 1 || k == n - 1)
        wide_ = _mm512_add_epi32(wide_, _mm512_madd_epi16(narrow_, _mm512_set1_epi16(1)));
    }
#endif
  }
#if defined(__AVX512VNNI__)
  // A sum that started at the bits of 1.5 * 2^23 is, read as a float, 1.5 * 2^23 more than it counts: one fma with
  // the scale and -1.5 * 2^23 * scale scales it, without a conversion, and rounds once. Scales have 19 bits at
  // most, so that the second factor is exact.
  struct Scale {
    Vec by, less;
  };
  static PKV_INLINE Scale scale(Vec by) { return {by, mul(by, set1(-0x1.8p23f))}; }
  PKV_INLINE Vec times(const Scale& s) const { return fma(_mm512_castsi512_ps(wide_), s.by, s.less); }

 private:
  static constexpr int32_t kZero = 0x4b400000;
#else
  using Scale = Vec;
  static PKV_INLINE Scale scale(Vec by) { return by; }
  PKV_INLINE Vec times(Scale by) const { return mul(by, _mm512_cvtepi32_ps(wide_)); }

 private:
  static constexpr int32_t kZero = 0;
#endif
  __m512i wide_, narrow_;
};

}  // namespace
}  // namespace pagedkv::products::PKV_ISA
