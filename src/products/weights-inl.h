// The blocks of each weight format with 32 elements to a block (weights_k-inl.h: with 256), for kLanes rows at
// once: dword k of a group's codes to a register, a row to a lane. Compiled once per instruction set. Block
// layouts: ggml's block_q4_0 and its siblings.
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

// Bit k of each row's dword, as 16, into its code k.
PKV_INLINE void add_fifth_bits(Codes bits, Codes* codes) {
  codes[0] = either(codes[0], fifth_bits<0>(bits));
  codes[1] = either(codes[1], fifth_bits<1>(bits));
  codes[2] = either(codes[2], fifth_bits<2>(bits));
  codes[3] = either(codes[3], fifth_bits<3>(bits));
  codes[4] = either(codes[4], fifth_bits<4>(bits));
  codes[5] = either(codes[5], fifth_bits<5>(bits));
  codes[6] = either(codes[6], fifth_bits<6>(bits));
  codes[7] = either(codes[7], fifth_bits<7>(bits));
}

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
    add_fifth_bits(load_dwords(heads.fifth.words[b]), codes);
    const Vec d = heads.d.f16(b);
    visit(0, codes, d, zero());
  }
};

struct Q51 {
  static constexpr int kElements = 32, kBytes = 24, kMaxCode = 31, kOffset = 0, kPart = 32;
  static constexpr bool kHasShift = true;
  struct Heads {
    Column<uint32_t, kBytes, 0> dm;
    Column<uint32_t, kBytes, 4> fifth;
    PKV_INLINE void read(const uint8_t* p, int64_t stride, int64_t n) {
      dm.read(p, stride, n);
      fifth.read(p, stride, n);
    }
  };
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads& heads, int64_t b, Visit visit) {
    Codes codes[8];
    nibbles(p + 8, stride, codes);
    add_fifth_bits(load_dwords(heads.fifth.words[b]), codes);
    const Codes dm = load_dwords(heads.dm.words[b]);
    const Vec d = f16_of_low(dm);
    visit(0, codes, d, f16_of_high(dm));
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

// The levels of IQ4_NL and IQ4_XS.
alignas(16) constexpr int8_t kIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// 16 bytes a row with two levels each.
PKV_INLINE void levels(const uint8_t* p, int64_t stride, Codes* codes) {
  nibbles(p, stride, codes);
#pragma GCC unroll 8
  for (int k = 0; k < 8; ++k) codes[k] = prepare_signed(looked_up(kIQ4, codes[k]));
}

struct IQ4NL {
  static constexpr int kElements = 32, kBytes = 18, kMaxCode = 0, kOffset = kSignedBias, kPart = 32;
  static constexpr bool kHasShift = false;
  using Heads = Column<uint16_t, kBytes, 0>;  // d
  template <class Visit>
  static PKV_INLINE void block(const uint8_t* p, int64_t stride, const Heads& heads, int64_t b, Visit visit) {
    Codes codes[8];
    levels(p + 2, stride, codes);
    const Vec d = heads.f16(b);
    visit(0, codes, d, zero());
  }
};

}  // namespace
}  // namespace pagedkv::products::PKV_ISA
