// A tile is up to 64 tokens of one sequence with one KV head: where its rows lie, and the two products over it.
// Compiled once per instruction set.
//
// Order of sums, the same for every shape of register block (docs/numerics.md): q.k adds products lane by lane
// along the row, then the lanes by one fixed tree; p.v adds tokens in order, each channel for itself.
#pragma once

#include "kernels/rows-inl.h"

namespace pagedkv::kernels::PKV_ISA {
namespace {

constexpr int kTile = int(kTileTokens);
static_assert(kTile == 64 && kRunTokens % kTile == 0 && kTile % kAccs == 0 && kTile % kLanes == 0);

// Stands in for rows that are not there; whoever reads it masks the result.
alignas(64) const uint8_t kNoRow[kMaxHeadDim * 4] = {};

// Tokens of a tile that lie in one block.
struct Piece {
  const uint8_t* k_scales;  // of the first token; null: no block, or no scales
  const uint8_t* v_scales;
  int first, n;
};

struct Tile {
  const uint8_t* k[kTile];
  const uint8_t* v[kTile];
  float k_scales[kTile], v_scales[kTile];  // after load_scales()
  Piece pieces[kTile];
  int n_pieces;
  uint64_t missing;  // bit t: token t has no block, nobody sees it
  int n;             // tokens
};

PKV_INLINE void find_rows(const RowStore& store, int64_t block, int64_t slot, int64_t head, int n,
                          const uint8_t** rows) {
  const uint8_t* row = reinterpret_cast<const uint8_t*>(store.rows) + block * store.block_stride +
                       slot * store.slot_stride + head * store.head_stride;
  for (int i = 0; i < n; ++i) rows[i] = row + i * store.slot_stride;
}
PKV_INLINE const uint8_t* find_scales(const RowStore& store, int64_t block, int64_t slot, int64_t head) {
  if (!has_scales(store.format)) return nullptr;
  const uint8_t* scales = reinterpret_cast<const uint8_t*>(store.scales) + block * store.scale_block_stride +
                          slot * store.scale_slot_stride + head * store.scale_head_stride;
  prefetch(scales);
  return scales;
}

// Tokens [first, first + n) of a sequence. Table entries that name no block of the pool make their tokens missing.
// Reads the table and nothing else: the rows and scales are for later.
void find_tile(const LayerStore& layer, const int32_t* table, int64_t max_blocks, int64_t first, int n,
               int64_t head, Tile& tile) {
  tile.n = n;
  tile.n_pieces = 0;
  tile.missing = 0;
  int64_t place = first / layer.block_size, slot = first % layer.block_size;
  int t = 0;
  while (t < n) {
    const int64_t left = layer.block_size - slot;
    const int run = left < n - t ? int(left) : n - t;
    const int64_t block = place < max_blocks ? table[place] : -1;
    Piece& piece = tile.pieces[tile.n_pieces++];
    piece = {nullptr, nullptr, t, run};
    if (block >= 0 && block < layer.num_blocks) {
      find_rows(layer.k, block, slot, head, run, tile.k + t);
      find_rows(layer.v, block, slot, head, run, tile.v + t);
      piece.k_scales = find_scales(layer.k, block, slot, head);
      piece.v_scales = find_scales(layer.v, block, slot, head);
    } else {
      for (int i = t; i < t + run; ++i) {
        tile.k[i] = tile.v[i] = kNoRow;
        tile.missing |= uint64_t{1} << i;
      }
    }
    t += run;
    ++place;
    slot = 0;
  }
  // Register blocks read whole groups of tokens, and prefetching does not look at n.
  for (; t < kTile; ++t) tile.k[t] = tile.v[t] = kNoRow;
}

// n scales; zeros where there is no block.
PKV_INLINE void copy_scales(const uint8_t* from, int64_t stride, int n, float* to) {
  int i = 0;
  if (from == nullptr) {
    for (; i < n; ++i) to[i] = 0;
    return;
  }
  if (stride == int64_t(sizeof(float)))
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(reinterpret_cast<const float*>(from) + i));
  for (; i < n; ++i) __builtin_memcpy(to + i, from + i * stride, sizeof(float));
}
void load_scales(const LayerStore& layer, Tile& tile) {
  const bool k = has_scales(layer.k.format), v = has_scales(layer.v.format);
  for (int i = 0; i < tile.n_pieces; ++i) {
    const Piece& piece = tile.pieces[i];
    if (k) copy_scales(piece.k_scales, layer.k.scale_slot_stride, piece.n, tile.k_scales + piece.first);
    if (v) copy_scales(piece.v_scales, layer.v.scale_slot_stride, piece.n, tile.v_scales + piece.first);
  }
  for (int t = tile.n; t < kTile; ++t) tile.k_scales[t] = tile.v_scales[t] = 0;
}

// Rows of a tile, packed or decoded, and rows to fetch into the L2 cache meanwhile (null: none).
struct TileRows {
  const uint8_t* const* rows;
  const uint8_t* const* ahead;
  int64_t row_bytes;
  bool adjacent = false;  // rows lie one behind the other, at least in groups of eight
};

constexpr int tokens_per_block(int n_rows) { return kAccs / (n_rows == 3 ? 4 : n_rows); }

PKV_INLINE void prefetch_row(const uint8_t* row, int64_t row_bytes) {
  for (int64_t i = 0; i < row_bytes; i += 64) prefetch(row + i);
}

// s[r][t] = q[r] . k[t] for R rows and tokens [begin, end), rounded out to whole register blocks.
//   q  [R, q_stride] in lane order   s  [R, kTile]
template <class Codec, int R>
void dot_rows(const TileRows& k, const float* q, int64_t q_stride, int begin, int end, float* s) {
  constexpr int kTokens =
      tokens_per_block(R);  // tokens of a register block: R * kTokens accumulators, reduced together
  constexpr int kGroup = kTokens < 4 ? kTokens : 4;  // tokens whose chains run at once
  const int64_t n_full = k.row_bytes / Codec::kUnitBytes;
  const int n_tail = int(k.row_bytes - n_full * Codec::kUnitBytes);
  for (int t = begin / kTokens * kTokens; t < end; t += kTokens) {
    Vec acc[kAccs];
#pragma GCC unroll 16
    for (Vec& sum : acc) sum = zero();
#pragma GCC unroll 4
    for (int g = 0; g < kTokens; g += kGroup) {
      const uint8_t* row[kGroup];
#pragma GCC unroll 4
      for (int j = 0; j < kGroup; ++j) row[j] = k.rows[t + g + j];
      const float* qu = q;
      for (int64_t u = 0; u < n_full; ++u) {
#pragma GCC unroll 4
        for (int j = 0; j < kGroup; ++j) {
          Vec x[Codec::kVecs];
          Codec::load(row[j] + u * Codec::kUnitBytes, x);
#pragma GCC unroll 2
          for (int i = 0; i < Codec::kVecs; ++i) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              acc[r * kTokens + g + j] = fma(load(qu + r * q_stride + i * kLanes), x[i], acc[r * kTokens + g + j]);
            }
          }
        }
        qu += Codec::kVecs * kLanes;
      }
      if (n_tail != 0) {
#pragma GCC unroll 4
        for (int j = 0; j < kGroup; ++j) {
          Vec x[Codec::kVecs];
          load_tail<Codec>(row[j] + n_full * Codec::kUnitBytes, n_tail, x);
#pragma GCC unroll 2
          for (int i = 0; i < Codec::kVecs; ++i) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              acc[r * kTokens + g + j] = fma(load(qu + r * q_stride + i * kLanes), x[i], acc[r * kTokens + g + j]);
            }
          }
        }
      }
    }
    if (k.ahead != nullptr) {
      for (int j = 0; j < kTokens; ++j) prefetch_row(k.ahead[t + j], k.row_bytes);
    }
    alignas(64) float sums[kAccs];
    reduce_accs(acc, sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) __builtin_memcpy(s + r * kTile + t, sums + r * kTokens, kTokens * sizeof(float));
  }
}

// acc[r] = acc[r] * alpha[r] + sum over tokens [begin, end) of p[r][t] * v[t], for U units of the row at `offset`.
template <class Codec, int R, int U, bool kTail>
PKV_INLINE void add_panel(const TileRows& v, const float* p, const float* alpha, int begin, int end, int64_t offset,
                          int n_tail, float* acc, int64_t acc_stride) {
  constexpr int kVecs = U * Codec::kVecs;
  Vec a[R * kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) a[r * kVecs + c] = mul(load(acc + r * acc_stride + c * kLanes), set1(alpha[r]));
  }
  for (int t = begin; t < end; ++t) {
    Vec x[kVecs];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const uint8_t* unit = v.rows[t] + offset + u * Codec::kUnitBytes;
      if constexpr (kTail) {
        load_tail<Codec>(unit, n_tail, x + u * Codec::kVecs);
      } else {
        Codec::load(unit, x + u * Codec::kVecs);
      }
    }
    if (v.ahead != nullptr) {
      for (int64_t i = 0; i < U * Codec::kUnitBytes; i += 64) prefetch(v.ahead[t] + offset + i);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec weight = set1(p[r * kTile + t]);
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) a[r * kVecs + c] = fma(weight, x[c], a[r * kVecs + c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) store(acc + r * acc_stride + c * kLanes, a[r * kVecs + c]);
  }
}

// As many panels of U units as the row still has, then narrower ones.
template <class Codec, int R, int U>
PKV_INLINE void add_panels(const TileRows& v, const float* p, const float* alpha, int begin, int end,
                           int64_t offset, float* acc, int64_t acc_stride) {
  constexpr int64_t kBytes = U * Codec::kUnitBytes;
  while (v.row_bytes - offset >= kBytes) {
    add_panel<Codec, R, U, false>(v, p, alpha, begin, end, offset, 0, acc, acc_stride);
    offset += kBytes;
    acc += U * Codec::kVecs * kLanes;
  }
  if constexpr (U > 1) {
    add_panels<Codec, R, U / 2>(v, p, alpha, begin, end, offset, acc, acc_stride);
  } else if (v.row_bytes > offset) {
    add_panel<Codec, R, 1, true>(v, p, alpha, begin, end, offset, int(v.row_bytes - offset), acc, acc_stride);
  }
}

//   p  [R, kTile]   alpha  [R]   acc  [R, acc_stride] in lane order
template <class Codec, int R>
void add_rows(const TileRows& v, const float* p, const float* alpha, int begin, int end, float* acc,
              int64_t acc_stride) {
  constexpr int kColumns = tokens_per_block(R) < 8 ? tokens_per_block(R) : 8;
  constexpr int kUnits = kColumns / Codec::kVecs > 0 ? kColumns / Codec::kVecs : 1;
  add_panels<Codec, R, kUnits>(v, p, alpha, begin, end, 0, acc, acc_stride);
}

using DotRows = void (*)(const TileRows& k, const float* q, int64_t q_stride, int begin, int end, float* s);
using AddRows = void (*)(const TileRows& v, const float* p, const float* alpha, int begin, int end, float* acc,
                         int64_t acc_stride);

constexpr int kBlockRows = 4;  // query rows of a register block

// The products for 1 to kBlockRows rows.
struct Products {
  DotRows dot[kBlockRows];
  AddRows add[kBlockRows];
};
template <class Codec>
constexpr Products kProducts = {
    {dot_rows<Codec, 1>, dot_rows<Codec, 2>, dot_rows<Codec, 3>, dot_rows<Codec, 4>},
    {add_rows<Codec, 1>, add_rows<Codec, 2>, add_rows<Codec, 3>, add_rows<Codec, 4>},
};

const Products& products_of(Format format) {
  switch (format) {
    case Format::kF32:
      return kProducts<F32Codec>;
    case Format::kF16:
      return kProducts<F16Codec>;
    case Format::kBF16:
      return kProducts<BF16Codec>;
    case Format::kQ8:
      return kProducts<Q8Codec>;
    case Format::kQ6:
      return kProducts<Q6Codec>;
    case Format::kQ4:
      return kProducts<Q4Codec>;
  }
  return kProducts<F32Codec>;
}

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
