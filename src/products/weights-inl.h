// The blocks of each weight format, for kLanes rows at once: dword k of a group's codes to a register, a row to a
// lane. Compiled once per instruction set. Block layouts: ggml's block_q4_0 and its siblings.
//
// A codec says
//   kElements, kBytes   of a block of the file
//   kMaxCode            the largest code; 0: codes are signed
//   kOffset             what was added to the codes to make them unsigned
//   kPart               elements that share a scale: 32, or 16
//   kHasShift           weight = scale * code + shift, else scale * (code - kOffset)
// and calls visit(part, codes[kPart / 4], scale, shift) for each part of a block, in the order in which products
// are added. Blocks come in runs of kDepth elements; `Heads` has what is cheaper to collect for a run.
#pragma once

namespace pagedkv::products::PKV_ISA {
namespace {

// Words that lie in every block at `at`: [block][row].
template <class Word, int block_bytes, int at>
struct Column {
  Word words[kDepth / kGroup][kLanes];

  PKV_INLINE void read(const uint8_t* p, int64_t stride, int64_t n_blocks) {
    for (int r = 0; r < kLanes; ++r)
      for (int64_t b = 0; b < n_blocks; ++b)
        __builtin_memcpy(&words[b][r], p + r * stride + b * block_bytes + at, sizeof(Word));
  }
  PKV_INLINE Vec f16(int64_t block) const { return load_f16(reinterpret_cast<const uint8_t*>(words[block])); }
};

// 16 bytes a row with two codes each: elements 0-15 low, 16-31 high.
PKV_INLINE void nibbles(const uint8_t* p, int64_t stride, Codes* codes) {
  Codes x[4];
  load_rows(p, stride, x);
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    codes[k] = masked(x[k], 15);
    codes[k + 4] = masked(right<4>(x[k]), 15);
  }
}

struct Q40 {
  static constexpr int kElements = 32, kBytes = 18, kMaxCode = 15, kOffset = 8, kPart = 32;
  static constexpr bool kHasShift = false;
  using Heads = Column<uint16_t, kBytes, 0>;  // d
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads& heads, int64_t b, Visit visit) {
    Codes codes[8];
    nibbles(p + 2, stride, codes);
    const Vec d = heads.f16(b);
    visit(0, codes, d, zero());
  }
};

struct Q41 {
  static constexpr int kElements = 32, kBytes = 20, kMaxCode = 15, kOffset = 0, kPart = 32;
  static constexpr bool kHasShift = true;
  using Heads = Column<uint32_t, kBytes, 0>;  // d and m
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads& heads, int64_t b, Visit visit) {
    Codes codes[8];
    nibbles(p + 4, stride, codes);
    const Codes dm = load_dwords(heads.words[b]);
    const Vec d = f16_of_low(dm);
    visit(0, codes, d, f16_of_high(dm));
  }
};

struct Q50 {
  static constexpr int kElements = 32, kBytes = 22, kMaxCode = 31, kOffset = 16, kPart = 32;
  static constexpr bool kHasShift = false;
  struct Heads {
    Column<uint16_t, kBytes, 0> d;
    Column<uint32_t, kBytes, 2> fifth;
    PKV_INLINE void read(const uint8_t* p, int64_t stride, int64_t n) {
      d.read(p, stride, n);
      fifth.read(p, stride, n);
    }
  };
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads& heads, int64_t b, Visit visit) {
    Codes codes[8];
    nibbles(p + 6, stride, codes);
    const Codes bits = load_dwords(heads.fifth.words[b]);
    codes[0] = either(codes[0], fifth_bits<0>(bits));
    codes[1] = either(codes[1], fifth_bits<1>(bits));
    codes[2] = either(codes[2], fifth_bits<2>(bits));
    codes[3] = either(codes[3], fifth_bits<3>(bits));
    codes[4] = either(codes[4], fifth_bits<4>(bits));
    codes[5] = either(codes[5], fifth_bits<5>(bits));
    codes[6] = either(codes[6], fifth_bits<6>(bits));
    codes[7] = either(codes[7], fifth_bits<7>(bits));
    const Vec d = heads.d.f16(b);
    visit(0, codes, d, zero());
  }
};

struct Q80 {
  static constexpr int kElements = 32, kBytes = 34, kMaxCode = 0, kOffset = kSignedBias, kPart = 32;
  static constexpr bool kHasShift = false;
  using Heads = Column<uint16_t, kBytes, 0>;  // d
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads& heads, int64_t b, Visit visit) {
    Codes codes[8];
    load_rows(p + 2, stride, codes);
    load_rows(p + 18, stride, codes + 4);
#pragma GCC unroll 8
    for (Codes& x : codes) x = prepare_signed(x);
    const Vec d = heads.f16(b);
    visit(0, codes, d, zero());
  }
};

// Byte k of each dword.
template <int k>
PKV_INLINE Vec byte_of(Codes x) {
  return to_floats(right<24>(left<24 - 8 * k>(x)), 0);
}
template <int k>
PKV_INLINE Vec signed_byte_of(Codes x) {
  return to_floats(right_signed<24>(left<24 - 8 * k>(x)), 0);
}

struct NoHeads {
  PKV_INLINE void read(const uint8_t*, int64_t, int64_t) {}
};

// f16 d, f16 dmin, 8 scales and 8 minima of 6 bits in 12 bytes, then 128 bytes: of every 32, low nibbles are a
// group and high nibbles the next.
struct Q4K {
  static constexpr int kElements = 256, kBytes = 144, kMaxCode = 15, kOffset = 0, kPart = 32;
  static constexpr bool kHasShift = true;
  using Heads = NoHeads;

  // Groups 2 * pair and 2 * pair + 1 of the four at place `at`; scales and minima are those of the four.
  template <int pair, class Visit>
  static PKV_INLINE void groups(int at, const uint8_t* p, int64_t stride, Vec d, Vec dmin, const Codes* scales,
                                Visit visit) {
    Codes x[8], codes[8];
    load_rows(p + pair * 32, stride, x);
    load_rows(p + pair * 32 + 16, stride, x + 4);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) codes[k] = masked(x[k], 15);
    visit(at + 2 * pair, codes, mul(d, byte_of<2 * pair>(scales[0])), mul(dmin, byte_of<2 * pair>(scales[1])));
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) codes[k] = masked(right<4>(x[k]), 15);
    visit(at + 2 * pair + 1, codes, mul(d, byte_of<2 * pair + 1>(scales[0])),
          mul(dmin, byte_of<2 * pair + 1>(scales[1])));
  }
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads&, int64_t, Visit visit) {
    Codes head[4];
    load_rows(p, stride, head);
    const Vec d = f16_of_low(head[0]), dmin = sub(zero(), f16_of_high(head[0]));
    const Codes scales[2][2] = {{masked(head[1], 63), masked(head[2], 63)},
                                {either(masked(head[3], 15), left<4>(masked(right<6>(head[1]), 3))),
                                 either(masked(right<4>(head[3]), 15), left<4>(masked(right<6>(head[2]), 3)))}};
#pragma GCC unroll 1
    for (int half = 0; half < 2; ++half) {
      groups<0>(4 * half, p + 16 + 64 * half, stride, d, dmin, scales[half], visit);
      groups<1>(4 * half, p + 16 + 64 * half, stride, d, dmin, scales[half], visit);
    }
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
