// exp, tanh, and the state of a softmax that is built up piece by piece. Compiled once per instruction set.
#pragma once

#include "kernels/rows-inl.h"

namespace pagedkv::kernels::PKV_ISA {
namespace {

constexpr float kInf = __builtin_inff();

// e^x for x <= 88: about 1 ulp; 0 below -87, and so for -infinity; exactly 1 at 0.
// Source: Cephes expf (Cody-Waite reduction, polynomial of degree 6).
PKV_INLINE Vec exp(Vec x) {
  const Vec n = round_even(mul(max(x, set1(-88.0f)), set1(1.44269504088896341f)));
  Vec r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Vec p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  // n is in [-126, 127] for all that is kept; a NaN comes through in p.
  return select_less(x, set1(-87.0f), zero(), scale_pow2(p, max(n, set1(-126.0f))));
}

// e^x within 4e-6, for weights that are rounded to 8 bits anyway; exactly 1 at 0. Requires x > -1e30, not infinity.
// 2^f for |f| <= 1/2: the polynomial of degree 4 through 1 at 0 whose largest relative error is smallest (3.6e-6).
PKV_INLINE Vec exp_for_codes(Vec x) {
  const Vec log2e = set1(1.44269504088896341f);
  const Vec y = mul(x, log2e), n = round_even(y), f = sub(y, n);
  Vec p = set1(9.782912553e-3f);
  p = fma(p, f, set1(5.597688363e-2f));
  p = fma(p, f, set1(2.402071108e-1f));
  p = fma(p, f, set1(6.931136044e-1f));
  return scale_pow2_or_zero(fma(p, f, set1(1.0f)), n);
}

// Source: Cephes tanhf. Near 0 the polynomial keeps the relative error, which the exponential would lose.
PKV_INLINE Vec tanh(Vec x) {
  const Vec z = mul(x, x);
  Vec p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const Vec near = fma(mul(p, z), x, x);
  const Vec e = exp(mul(min(abs(x), set1(20.0f)), set1(2.0f)));
  const Vec far = sub(set1(1.0f), div(set1(2.0f), add(e, set1(1.0f))));
  const Vec signed_far = select_less(x, zero(), sub(zero(), far), far);
  return select_less(abs(x), set1(0.625f), near, signed_far);
}

PKV_INLINE float exp1(float x) {
  float lanes[kLanes];
  store(lanes, exp(set1(x)));
  return lanes[0];
}

// What a row has seen so far: sum of p = e^(logit - max), and acc = sum of p*v beside it.
struct RowState {
  float max;  // -inf: no key yet; acc and sum are 0 then
  float sum;
};

// The subtrahend of a row's logits: its maximum, or 0 where there is none ((-inf) - (-inf) would be NaN).
PKV_INLINE float finite_max(float max) { return max == -kInf ? 0.0f : max; }

// (acc_a, a) += (acc_b, b), over disjoint keys. An empty side leaves the other's bits alone. The one way in which
// runs are joined, in an unsplit item as in merge.
PKV_INLINE void fold_run(float* acc_a, RowState& a, const float* acc_b, RowState b, int64_t padded) {
  const float max = a.max < b.max ? b.max : a.max;
  const float base = finite_max(max);
  const float scale_a = exp1(a.max - base), scale_b = exp1(b.max - base);
  const Vec va = set1(scale_a), vb = set1(scale_b);
  for (int64_t i = 0; i < padded; i += kLanes) {
    store(acc_a + i, fma(load(acc_b + i), vb, mul(load(acc_a + i), va)));
  }
  a.sum = b.sum * scale_b + a.sum * scale_a;
  a.max = max;
}

struct FinishedRow {
  float* out;         // [head_dim]
  float* lse;         // or null
  const float* sink;  // or null
};

// Where channels lie in a row of sums.
enum class Lanes { kInOrder, kEvenOdd, kZipped };

// acc / sum, the sink in the sum; acc is overwritten. Adding 0 makes every zero a positive one: the sign of a zero
// would depend on how many masked keys were skipped.
void finish_row(float* acc, RowState state, Lanes lanes, int64_t padded, int64_t head_dim, const FinishedRow& row) {
  if (state.sum == 0) {  // no key: the largest logit alone would have added 1. A NaN is not taken for none.
    for (int64_t i = 0; i < head_dim; ++i) row.out[i] = 0;
    if (row.lse != nullptr) *row.lse = -kInf;
    return;
  }
  float scale = 1;
  if (row.sink != nullptr) {
    const float max = state.max < *row.sink ? *row.sink : state.max;
    scale = exp1(state.max - max);
    state.sum = state.sum * scale + exp1(*row.sink - max);
    state.max = max;
  }
  const Vec factor = set1(scale), divisor = set1(state.sum);
  for (int64_t i = 0; i < padded; i += kLanes) {
    store(acc + i, add(div(mul(load(acc + i), factor), divisor), zero()));
  }
  switch (lanes) {
    case Lanes::kInOrder:
      __builtin_memcpy(row.out, acc, size_t(head_dim) * sizeof(float));
      break;
    case Lanes::kEvenOdd:
      for (int64_t i = 0; i < head_dim; ++i) row.out[i] = acc[lane_of(Format::kQ4, i)];
      break;
    case Lanes::kZipped:
      for (int64_t i = 0; i < head_dim; ++i) row.out[i] = acc[zipped_lane(i)];
      break;
  }
  if (row.lse != nullptr) *row.lse = state.max + __builtin_logf(state.sum);
}

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
