// A tile's keys and values as floats, laid out once for the many rows of a prompt. Compiled once per instruction
// set.
//
// Sums are those of tile-inl.h to the bit. There a register holds the lanes of one product q.k, here one lane of
// the products with many tokens: what was a tree across the lanes of a register is one across registers.
#pragma once

#include "kernels/tile-inl.h"

namespace pagedkv::kernels::PKV_ISA {
namespace {

constexpr int kPanelVecs = kAccs / kBlockRows;  // registers of a panel's row
constexpr int kPanelFloats = kPanelVecs * kLanes;
static_assert(kTile % kPanelFloats == 0);

// Lanes in the order in which the tree (docs/numerics.md) adds them: of four 0, 2, 1, 3. Its own inverse.
constexpr int in_tree_order(int lane) { return (lane & ~3) | (lane & 1) << 1 | (lane >> 1 & 1); }
constexpr int kTreeLevels = kLanes == 16 ? 4 : kLanes == 8 ? 3 : 2;
static_assert(1 << kTreeLevels == kLanes);

// Packed keys as [kTile / kPanelFloats][lanes in tree order][dk / kLanes][kPanelFloats tokens].
void lay_out_key_floats(DecodeRow decode, const TileRows& k, int64_t dk, float* panel) {
  alignas(64) float rows[kLanes * kMaxHeadDim];
  const int64_t steps = dk / kLanes;
  for (int t = 0; t < kTile; t += kLanes) {
    for (int i = 0; i < kLanes; ++i) decode(k.rows[t + i], k.row_bytes, rows + i * dk);
    float* to = panel + t / kPanelFloats * kPanelFloats * dk + t % kPanelFloats;
    for (int64_t step = 0; step < steps; ++step) {
      Codes x[kLanes];
      for (int i = 0; i < kLanes; ++i)
        x[i] = load_codes(reinterpret_cast<const uint8_t*>(rows + i * dk + step * kLanes));
      transpose_square(x);
      for (int lane = 0; lane < kLanes; ++lane) {
        store_codes(reinterpret_cast<uint8_t*>(to + (in_tree_order(lane) * steps + step) * kPanelFloats), x[lane]);
      }
    }
  }
}

// As dot_rows().
template <int R>
void dot_key_floats(const float* panel, int64_t dk, const float* q, int64_t q_stride, int end, float* s) {
  constexpr int kSums = R * kPanelVecs;
  const int64_t steps = dk / kLanes;
  for (int t = 0; t < end; t += kPanelFloats) {
    Vec pending[kTreeLevels + 1][kSums];  // by level of the tree
    for (int lane = 0; lane < kLanes; ++lane) {
      Vec sums[kSums];
#pragma GCC unroll 16
      for (Vec& sum : sums) sum = zero();
      const float* from = q + in_tree_order(lane);
      for (int64_t i = 0; i < steps; ++i, from += kLanes, panel += kPanelFloats) {
        Vec x[kPanelVecs];
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVecs; ++v) x[v] = load(panel + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const Vec element = set1(from[r * q_stride]);
#pragma GCC unroll 4
          for (int v = 0; v < kPanelVecs; ++v)
            sums[r * kPanelVecs + v] = fma(element, x[v], sums[r * kPanelVecs + v]);
        }
      }
      int level = 0;
      for (; (lane >> level & 1) != 0; ++level) {
#pragma GCC unroll 16
        for (int i = 0; i < kSums; ++i) sums[i] = add(pending[level][i], sums[i]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kSums; ++i) pending[level][i] = sums[i];
    }
    for (int i = 0; i < kSums; ++i)
      store(s + i / kPanelVecs * kTile + t + i % kPanelVecs * kLanes, pending[kTreeLevels][i]);
  }
}

// Packed values as [columns][kTile][floats of a column]: as many columns of kPanelFloats as there are, then
// narrower ones.
void lay_out_value_floats(DecodeRow decode, const TileRows& v, int64_t dv, float* panel) {
  alignas(64) float row[kMaxHeadDim];
  for (int t = 0; t < kTile; ++t) {
    decode(v.rows[t], v.row_bytes, row);
    int64_t width = kPanelFloats;
    for (int64_t first = 0; first < dv; first += width) {
      while (dv - first < width) width /= 2;
      for (int64_t i = 0; i < width; i += kLanes)
        store(panel + first * kTile + t * width + i, load(row + first + i));
    }
  }
}

// One column of V registers; as add_rows().
template <int R, int V>
PKV_INLINE void add_column(const float* column, const float* p, const float* alpha, int end, float* acc,
                           int64_t acc_stride) {
  Vec sums[R * V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[r * V + v] = mul(load(acc + r * acc_stride + v * kLanes), set1(alpha[r]));
  }
  for (int t = 0; t < end; ++t, column += V * kLanes) {
    Vec x[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) x[v] = load(column + v * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = set1(p[r * kTile + t]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r * V + v] = fma(weight, x[v], sums[r * V + v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) store(acc + r * acc_stride + v * kLanes, sums[r * V + v]);
  }
}
template <int R, int V>
PKV_INLINE void add_columns(const float* panel, int64_t dv, const float* p, const float* alpha, int end, float* acc,
                            int64_t acc_stride) {
  constexpr int kWidth = V * kLanes;
  for (; dv >= kWidth; dv -= kWidth, acc += kWidth, panel += kTile * kWidth)
    add_column<R, V>(panel, p, alpha, end, acc, acc_stride);
  if constexpr (V > 1) add_columns<R, V / 2>(panel, dv, p, alpha, end, acc, acc_stride);
}
template <int R>
void add_value_floats(const float* panel, int64_t dv, const float* p, const float* alpha, int end, float* acc) {
  add_columns<R, kPanelVecs>(panel, dv, p, alpha, end, acc, dv);
}

using DotFloats = void (*)(const float* panel, int64_t dk, const float* q, int64_t q_stride, int end, float* s);
using AddFloats = void (*)(const float* panel, int64_t dv, const float* p, const float* alpha, int end, float* acc);

// The products for 1 to kBlockRows rows.
struct FloatProducts {
  DotFloats dot[kBlockRows];
  AddFloats add[kBlockRows];
};
constexpr FloatProducts kFloatProducts = {
    {dot_key_floats<1>, dot_key_floats<2>, dot_key_floats<3>, dot_key_floats<4>},
    {add_value_floats<1>, add_value_floats<2>, add_value_floats<3>, add_value_floats<4>},
};

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
