// Sums of products of codes in 32-bit lanes, exact, and what becomes of them. Compiled once per instruction set.
#pragma once

namespace pagedkv::products::PKV_ISA {
namespace {

// The sum of some products of dwords of codes. max_code: the largest code of the weights; 0: they are signed and
// went through prepare_signed.
template <int max_code>
class Sum {
 public:
  PKV_INLINE void start() { wide_ = repeat(kZero); }
  // At what `offset`, a power of two, adds too much to products with codes of this sum.
  template <int offset>
  PKV_INLINE void start_below(int32_t sum_of_codes) {
    wide_ = minus(repeat(kZero), left<__builtin_ctz(offset)>(repeat(sum_of_codes)));
  }
  // k: counts the calls since start(), of n.
  PKV_INLINE void add([[maybe_unused]] int k, [[maybe_unused]] int n, Codes w, Codes x) {
    if constexpr (kByteDots) {
      wide_ = dot_unsigned(wide_, w, x);
    } else if constexpr (max_code == 0) {
      wide_ = dot_prepared_signed(wide_, w, x);
      hold(wide_);  // or the compiler adds in pairs, and keeps all products at once
    } else {        // 16-bit sums as long as they cannot overflow
      constexpr int kSteps = 32767 / (2 * 127 * max_code);
      const Ints words = byte_products(w, x);
      narrow_ = k % kSteps == 0 ? words : add_words(narrow_, words);
      hold(narrow_);
      if (k % kSteps == kSteps - 1 || k == n - 1) wide_ = add_pairs(wide_, narrow_);
    }
  }

  // Where bytes are multiplied in one instruction, a conversion would be a part of the time: there a sum starts at
  // the bits of 1.5 * 2^23, and is, read as a float, 1.5 * 2^23 more than it counts. One fma with the scale and
  // -1.5 * 2^23 * scale scales it and rounds once. Scales have 19 bits at most, so that the second factor is exact.
  struct Scale {
    Vec by, less;
  };
  static PKV_INLINE Scale scale(Vec by) { return {by, kByteDots ? mul(by, set1(-0x1.8p23f)) : zero()}; }
  PKV_INLINE Vec times(const Scale& s) const {
    return kByteDots ? fma(as_vec(wide_), s.by, s.less) : mul(s.by, to_floats(wide_, 0));
  }

 private:
  static constexpr int32_t kZero = kByteDots ? 0x4b400000 : 0;
  Ints wide_, narrow_;
};

}  // namespace
}  // namespace pagedkv::products::PKV_ISA
