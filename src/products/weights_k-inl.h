// The blocks of weight formats with 256 elements to a block, as weights-inl.h has them. Compiled once per
// instruction set. Block layouts: ggml's block_q4_K and its siblings.
#pragma once

#include "products/weights-inl.h"

namespace pagedkv::products::PKV_ISA {
namespace {

// Byte k of each dword.
template <int k>
PKV_INLINE Vec byte_of(Codes x, int32_t less = 0) {
  return to_floats(right<24>(left<24 - 8 * k>(x)), less);
}
template <int k>
PKV_INLINE Vec signed_byte_of(Codes x) {
  return to_floats(right_signed<24>(left<24 - 8 * k>(x)), 0);
}

struct NoHeads {
  PKV_INLINE void read(const uint8_t*, int64_t, int64_t) {}
};

// f16 d, f16 dmin, 8 scales and 8 minima of 6 bits in 12 bytes; with `five`, 32 bytes whose bit n is the fifth of
// group n's codes; then 128 bytes: of every 32, low nibbles are a group and high nibbles the next.
template <bool five>
struct WithMinimum {
  static constexpr int kElements = 256, kBytes = five ? 176 : 144, kMaxCode = five ? 31 : 15, kOffset = 0,
                       kPart = 32;
  static constexpr bool kHasShift = true;
  using Heads = NoHeads;

  // Bit n of a byte as 16, n below 4.
  template <int n>
  static PKV_INLINE Codes fifth(Codes code, Codes bits) {
    return five ? either(code, masked(left<4 - n>(bits), 16)) : code;
  }
  // Groups 2 * pair and 2 * pair + 1 of the four at place `at`; scales, minima and fifth bits are those of the
  // four.
  template <int pair, class Visit>
  static PKV_INLINE void groups(int at, const uint8_t* p, int64_t stride, Vec d, Vec dmin, const Codes* scales,
                                const Codes* bits, Visit visit) {
    Codes x[8], codes[8];
    load_rows(p + pair * 32, stride, x);
    load_rows(p + pair * 32 + 16, stride, x + 4);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) codes[k] = fifth<2 * pair>(masked(x[k], 15), bits[k]);
    visit(at + 2 * pair, codes, mul(d, byte_of<2 * pair>(scales[0])), mul(dmin, byte_of<2 * pair>(scales[1])));
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) codes[k] = fifth<2 * pair + 1>(masked(right<4>(x[k]), 15), bits[k]);
    visit(at + 2 * pair + 1, codes, mul(d, byte_of<2 * pair + 1>(scales[0])),
          mul(dmin, byte_of<2 * pair + 1>(scales[1])));
  }
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads&, int64_t, Visit visit) {
    Codes head[4], bits[8];
    load_rows(p, stride, head);
    if (five) load_rows(p + 16, stride, bits), load_rows(p + 32, stride, bits + 4);
    const Vec d = f16_of_low(head[0]), dmin = sub(zero(), f16_of_high(head[0]));
    const Codes scales[2][2] = {{masked(head[1], 63), masked(head[2], 63)},
                                {either(masked(head[3], 15), left<4>(masked(right<6>(head[1]), 3))),
                                 either(masked(right<4>(head[3]), 15), left<4>(masked(right<6>(head[2]), 3)))}};
#pragma GCC unroll 1
    for (int half = 0; half < 2; ++half) {
      const uint8_t* nibbles = p + kBytes - 128 + 64 * half;
      groups<0>(4 * half, nibbles, stride, d, dmin, scales[half], bits, visit);
      groups<1>(4 * half, nibbles, stride, d, dmin, scales[half], bits, visit);
      if (!five) continue;
#pragma GCC unroll 8
      for (Codes& x : bits) x = right<4>(x);
    }
  }
};
using Q4K = WithMinimum<false>;
using Q5K = WithMinimum<true>;

// 32 bytes of third bits, 64 bytes of two low bits, 16 scales of 6 bits in 12 bytes, of 16 elements each, f16 d. Of
// 128 elements, byte i holds 32q + i in its bits 2q; the bits of part 2q + i / 16 and the third bits of its group 4
// * half + q.
struct Q3K {
  static constexpr int kElements = 256, kBytes = 110, kMaxCode = 7, kOffset = 4, kPart = 16;
  static constexpr bool kHasShift = false;
  using Heads = NoHeads;

  // Part 2q + n of the eight at place `at`, whose scales are byte (2q + n) % 4 of `scales`. Third bits in bit q.
  template <int q, int n, class Visit>
  static PKV_INLINE void part(int at, const Codes* low, const Codes* third, Vec d, Codes scales, Visit visit) {
    Codes codes[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Codes bit = q < 2 ? left<(q < 2 ? 2 - q : 0)>(third[k]) : right<(q < 2 ? 0 : q - 2)>(third[k]);
      codes[k] = either(masked(right<2 * q>(low[k]), 3), masked(bit, 4));
    }
    visit(at + 2 * q + n, codes, mul(d, byte_of<(2 * q + n) % 4>(scales, 32)), zero());
  }
  template <int n, class Visit>
  static PKV_INLINE void parts(int half, const uint8_t* p, int64_t stride, Vec d, const Codes* scales,
                               Visit visit) {
    Codes low[4], third[4];
    load_rows(p + 32 + 32 * half + 16 * n, stride, low);
    load_rows(p + 16 * n, stride, third);
    if (half == 1) {
#pragma GCC unroll 4
      for (Codes& x : third) x = right<4>(x);
    }
    part<0, n>(8 * half, low, third, d, scales[0], visit);
    part<2, n>(8 * half, low, third, d, scales[1], visit);
    part<1, n>(8 * half, low, third, d, scales[0], visit);
    part<3, n>(8 * half, low, third, d, scales[1], visit);
  }
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads&, int64_t, Visit visit) {
    Codes tail[4];  // two bytes before the scales, the scales, d
    load_rows(p + 94, stride, tail);
    const Codes a = either(right<16>(tail[0]), left<16>(tail[1])),
                b = either(right<16>(tail[1]), left<16>(tail[2])),
                high = either(right<16>(tail[2]), left<16>(tail[3]));
    const Codes scales[4] = {either(masked(a, 15), left<4>(masked(high, 3))),
                             either(masked(b, 15), left<4>(masked(right<2>(high), 3))),
                             either(masked(right<4>(a), 15), left<4>(masked(right<4>(high), 3))),
                             either(masked(right<4>(b), 15), left<4>(masked(right<6>(high), 3)))};
    const Vec d = f16_of_high(tail[3]);
#pragma GCC unroll 1
    for (int half = 0; half < 2; ++half) {
      parts<0>(half, p, stride, d, scales + 2 * half, visit);
      parts<1>(half, p, stride, d, scales + 2 * half, visit);
    }
  }
};

// f16 d, 8 times two high bits of a scale, 8 nibbles of a scale, 8 groups of 16 bytes with two levels each.
struct IQ4XS {
  static constexpr int kElements = 256, kBytes = 136, kMaxCode = 0, kOffset = kSignedBias, kPart = 32;
  static constexpr bool kHasShift = false;
  using Heads = NoHeads;

  template <int n, class Visit>
  static PKV_INLINE void group(const uint8_t* p, int64_t stride, const Codes* head, Vec d, Visit visit) {
    Codes codes[8];
    levels(p + 8 + 16 * n, stride, codes);
    const Codes scale = either(right<28>(left<28 - 4 * n>(head[1])), left<4>(right<30>(left<14 - 2 * n>(head[0]))));
    visit(n, codes, mul(d, to_floats(scale, 32)), zero());
  }
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads&, int64_t, Visit visit) {
    Codes head[4];
    load_rows(p, stride, head);
    const Vec d = f16_of_low(head[0]);
    group<0>(p, stride, head, d, visit);
    group<1>(p, stride, head, d, visit);
    group<2>(p, stride, head, d, visit);
    group<3>(p, stride, head, d, visit);
    group<4>(p, stride, head, d, visit);
    group<5>(p, stride, head, d, visit);
    group<6>(p, stride, head, d, visit);
    group<7>(p, stride, head, d, visit);
  }
};

// 128 bytes of low nibbles, 64 bytes of two more bits, 16 signed scales of 16 elements each, f16 d. Of 128
// elements, parts 0 and 4 share 16 bytes of nibbles, and so do 2 and 6, 1 and 5, 3 and 7: they are visited in this
// order, which takes 16 bytes of the other bits after another.
struct Q6K {
  static constexpr int kElements = 256, kBytes = 210, kMaxCode = 63, kOffset = 32, kPart = 16;
  static constexpr bool kHasShift = false;
  using Heads = Column<uint16_t, kBytes, 208>;  // d

  // The pair n of the 128 elements at place `at` (in parts): nibbles at p, more bits in `more`.
  template <int n, class Visit>
  static PKV_INLINE void pair(int at, const uint8_t* p, int64_t stride, const Codes* more, Vec d, Codes scales_low,
                              Codes scales_high, Visit visit) {
    Codes x[4], codes[4];
    load_rows(p + n * 16, stride, x);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) codes[k] = either(masked(x[k], 15), masked(left<(n < 2 ? 4 : 2)>(more[k]), 48));
    visit(at + n, codes, mul(d, signed_byte_of<n>(scales_low)), zero());
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k)
      codes[k] = either(masked(right<4>(x[k]), 15), masked(right<(n < 2 ? 0 : 2)>(more[k]), 48));
    visit(at + 4 + n, codes, mul(d, signed_byte_of<n>(scales_high)), zero());
  }
  template <class Visit>
  static PKV_INLINE void half(int n, const uint8_t* p, int64_t stride, Vec d, Codes scales_low, Codes scales_high,
                              Visit visit) {
    Codes more[4];
    const uint8_t *nibbles = p + n * 64, *bits = p + 128 + n * 32;
    load_rows(bits, stride, more);
    pair<0>(8 * n, nibbles, stride, more, d, scales_low, scales_high, visit);
    pair<2>(8 * n, nibbles, stride, more, d, scales_low, scales_high, visit);
    load_rows(bits + 16, stride, more);
    pair<1>(8 * n, nibbles, stride, more, d, scales_low, scales_high, visit);
    pair<3>(8 * n, nibbles, stride, more, d, scales_low, scales_high, visit);
  }
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads& heads, int64_t b, Visit visit) {
    Codes scales[4];
    load_rows(p + 192, stride, scales);
    const Vec d = heads.f16(b);
#pragma GCC unroll 1
    for (int n = 0; n < 2; ++n) half(n, p, stride, d, scales[2 * n], scales[2 * n + 1], visit);
  }
};

// The place in its row of the i-th part that a codec visits.
template <class Codec>
PKV_INLINE int64_t visited(int64_t i) {
  if (Codec::kPart == 32) return i;
  constexpr int8_t kPlaces[8] = {0, 4, 2, 6, 1, 5, 3, 7};
  return (i & ~int64_t{7}) + kPlaces[i & 7];
}

}  // namespace
}  // namespace pagedkv::products::PKV_ISA
