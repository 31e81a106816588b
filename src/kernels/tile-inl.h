// A tile is up to 64 tokens of one sequence with one KV head: where its rows lie, and the two products over it.
// Compiled once per instruction set.
//
// Order of sums, the same for every shape of register block (docs/numerics.md): q.k adds products lane by lane
// along the row, then the lanes by one fixed tree; p.v adds tokens in order of their places, each channel for
// itself.
#pragma once

#include "kernels/rows-inl.h"

namespace pagedkv::kernels::PKV_ISA {
namespace {

constexpr int kTile = int(kTileTokens);
static_assert(kTile == 64 && kRunTokens % kTile == 0 && kTile % kAccs == 0 && kTile % kLanes == 0);

// Places of a tile's tokens: a token from each quarter of the tile in turn. Where blocks have 16 tokens, products
// read four blocks side by side, and the hardware prefetches four streams.
constexpr int kQuarterTokens = kTile / 4;
constexpr int place_of(int token) { return token % kQuarterTokens * 4 + token / kQuarterTokens; }
// The first place behind those of tokens [0, n).
constexpr int places_before(int n) {
  return n <= 0 ? 0 : n < kQuarterTokens ? place_of(n - 1) + 1 : place_of(n - n % kQuarterTokens - 1) + 1;
}
struct TokensOfPlaces {
  alignas(64) float at[kTile];
  constexpr TokensOfPlaces() : at() {
    for (int token = 0; token < kTile; ++token) at[place_of(token)] = float(token);
  }
};
constexpr TokensOfPlaces kTokenOfPlace;

// Stands in for rows that are not there; whoever reads it masks the result.
alignas(64) const uint8_t kNoRow[kMaxHeadDim * 4] = {};

// Tokens of a tile that lie in one block.
struct Piece {
  const uint8_t* k_scales;  // of the first token; null: no block, or no scales
  const uint8_t* v_scales;
  int first, n;
};

// All arrays of kTile go by places.
struct Tile {
  const uint8_t* k[kTile];
  const uint8_t* v[kTile];
  float k_scales[kTile], v_scales[kTile];  // after load_scales()
  Piece pieces[kTile];
  int n_pieces;
  uint64_t missing;  // bit i: the token at place i has no block, nobody sees it
  int begin, n;      // tokens [begin, n) are there
};

PKV_INLINE const uint8_t* find_row(const RowStore& store, int64_t block, int64_t slot, int64_t head) {
  return reinterpret_cast<const uint8_t*>(store.rows) + block * store.block_stride + slot * store.slot_stride +
         head * store.head_stride;
}
// All rows of a tile from the first of each quarter.
PKV_INLINE void fill_rows(const uint8_t* const* first, int64_t stride, const uint8_t** rows) {
  for (int i = 0; i < kQuarterTokens; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) rows[4 * i + j] = first[j] + i * stride;
  }
}
PKV_INLINE const uint8_t* find_scales(const RowStore& store, int64_t block, int64_t slot, int64_t head) {
  if (!has_scales(store.format)) return nullptr;
  const uint8_t* scales = reinterpret_cast<const uint8_t*>(store.scales) + block * store.scale_block_stride +
                          slot * store.scale_slot_stride + head * store.scale_head_stride;
  prefetch(scales);
  return scales;
}

// Tokens [first + begin, first + n) of a sequence. Table entries that name no block of the pool make their tokens
// missing. Reads the table and nothing else: the rows and scales are for later.
void find_tile(const LayerStore& layer, const int32_t* table, int64_t max_blocks, int64_t first, int begin, int n,
               int64_t head, Tile& tile) {
  tile.begin = begin;
  tile.n = n;
  tile.n_pieces = 0;
  tile.missing = 0;
  int64_t index = first / layer.block_size, slot = first % layer.block_size;
  int t = 0;
  const bool whole = begin == 0 && n == kTile && layer.block_size % kQuarterTokens == 0;
  const uint8_t* k_first[4];
  const uint8_t* v_first[4];
  for (; whole && t < kTile; t += kQuarterTokens) {
    const int64_t block = index < max_blocks ? table[index] : -1;
    if (block < 0 || block >= layer.num_blocks) break;
    k_first[t / kQuarterTokens] = find_row(layer.k, block, slot, head);
    v_first[t / kQuarterTokens] = find_row(layer.v, block, slot, head);
    tile.pieces[tile.n_pieces++] = {find_scales(layer.k, block, slot, head),
                                    find_scales(layer.v, block, slot, head), t, kQuarterTokens};
    slot += kQuarterTokens;
    if (slot < layer.block_size) continue;
    slot = 0;
    ++index;
  }
  if (t == kTile) {
    fill_rows(k_first, layer.k.slot_stride, tile.k);
    fill_rows(v_first, layer.v.slot_stride, tile.v);
    return;
  }
  index = first / layer.block_size;
  slot = first % layer.block_size;
  tile.n_pieces = 0;
  t = 0;
  while (t < n) {
    const int64_t left = layer.block_size - slot;
    const int run = left < n - t ? int(left) : n - t;
    const int64_t block = index < max_blocks ? table[index] : -1;
    Piece& piece = tile.pieces[tile.n_pieces++];
    piece = {nullptr, nullptr, t, run};
    if (block >= 0 && block < layer.num_blocks) {
      const uint8_t* k = find_row(layer.k, block, slot, head);
      const uint8_t* v = find_row(layer.v, block, slot, head);
      for (int i = 0; i < run; ++i) {
        tile.k[place_of(t + i)] = k + i * layer.k.slot_stride;
        tile.v[place_of(t + i)] = v + i * layer.v.slot_stride;
      }
      piece.k_scales = find_scales(layer.k, block, slot, head);
      piece.v_scales = find_scales(layer.v, block, slot, head);
    } else {
      for (int i = t; i < t + run; ++i) {
        tile.k[place_of(i)] = tile.v[place_of(i)] = kNoRow;
        tile.missing |= uint64_t{1} << place_of(i);
      }
    }
    t += run;
    ++index;
    slot = 0;
  }
  // All places up to the last one are read; what nobody sees may be anything, so it is not touched.
  for (int i = 0; i < begin; ++i) tile.k[place_of(i)] = tile.v[place_of(i)] = kNoRow;
  for (; t < kTile; ++t) tile.k[place_of(t)] = tile.v[place_of(t)] = kNoRow;
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
constexpr int kQuarters = kLanes / 4;  // of a register

// kLanes rows of as many dwords: x[i] becomes dword i of every row.
PKV_INLINE void transpose_square(Codes* x) {
  for (int g = 0; g < kQuarters; ++g) transpose_dwords(x + 4 * g);
  Codes rows[kLanes];
  for (int c = 0; c < 4; ++c) {
    Codes quarters[kQuarters];
    for (int g = 0; g < kQuarters; ++g) quarters[g] = x[4 * g + c];
    transpose_quarters(quarters);
    for (int i = 0; i < kQuarters; ++i) rows[4 * i + c] = quarters[i];
  }
  for (int i = 0; i < kLanes; ++i) x[i] = rows[i];
}

// Scales in the order of tokens to their places.
PKV_INLINE void to_places(const float* tokens, float* places) {
  static_assert(kQuarterTokens % kLanes == 0 && kLanes % 4 == 0);
  for (int first = 0; first < kQuarterTokens; first += kLanes) {
    Codes x[4];
    for (int j = 0; j < 4; ++j)
      x[j] = load_codes(reinterpret_cast<const uint8_t*>(tokens + j * kQuarterTokens + first));
    transpose_dwords(x);
    for (int g = 0; g < 4; g += kQuarters) {
      transpose_quarters(x + g);
      for (int i = 0; i < kQuarters; ++i)
        store_codes(reinterpret_cast<uint8_t*>(places + 4 * (first + 4 * i + g)), x[g + i]);
    }
  }
}
PKV_INLINE void load_scales(const RowStore& store, const Tile& tile, const uint8_t* Piece::*scales, float* places) {
  if (!has_scales(store.format)) return;
  alignas(64) float tokens[kTile];
  for (int i = 0; i < tile.n_pieces; ++i) {
    const Piece& piece = tile.pieces[i];
    copy_scales(piece.*scales, store.scale_slot_stride, piece.n, tokens + piece.first);
  }
  for (int t = 0; t < tile.begin; ++t) tokens[t] = 0;
  for (int t = tile.n; t < kTile; ++t) tokens[t] = 0;
  to_places(tokens, places);
}
void load_scales(const LayerStore& layer, Tile& tile) {
  load_scales(layer.k, tile, &Piece::k_scales, tile.k_scales);
  load_scales(layer.v, tile, &Piece::v_scales, tile.v_scales);
}

// Rows of a tile, packed or decoded, and rows to fetch into the L2 cache meanwhile (null: none).
struct TileRows {
  const uint8_t* const* rows;
  const uint8_t* const* ahead;
  int64_t row_bytes;
  bool adjacent = false;  // rows of a quarter lie one behind the other, at least in groups of four
};

constexpr int tokens_per_block(int n_rows) { return kAccs / (n_rows == 3 ? 4 : n_rows); }

// The lines of a tile to come, a line from each quarter in turn, as many as are read meanwhile: many at once would
// hold up the loads between them.
class RowFetch {
 public:
  explicit PKV_INLINE RowFetch(const TileRows& tile) : rows_(tile.ahead), row_bytes_(tile.row_bytes) {}

  // To be called for each `bytes` read.
  PKV_INLINE void beside(int bytes) {
    if (rows_ == nullptr) return;
    for (due_ += bytes; due_ >= 128 && row_ < kTile; due_ -= 128) {
      prefetch(rows_[row_ + quarter_] + offset_);
      prefetch(rows_[row_ + quarter_ + 1] + offset_);
      quarter_ ^= 2;
      if (quarter_ != 0) continue;
      offset_ += 64;
      if (offset_ < row_bytes_) continue;
      offset_ = 0;
      row_ += 4;
    }
  }

 private:
  const uint8_t* const* rows_;  // null: nothing to fetch
  int64_t row_bytes_;
  int64_t offset_ = 0;
  int row_ = 0, quarter_ = 0, due_ = 0;
};

// s[r][t] = q[r] . k[t] for R rows and tokens [0, end), rounded out to whole register blocks.
//   q  [R, q_stride] in lane order   s  [R, kTile]
template <class Codec, int R>
void dot_rows(const TileRows& k, const float* q, int64_t q_stride, int end, float* s) {
  constexpr int kTokens =
      tokens_per_block(R);  // tokens of a register block: R * kTokens accumulators, reduced together
  constexpr int kGroup = kTokens < 4 ? kTokens : 4;  // tokens whose chains run at once
  const int64_t n_full = k.row_bytes / Codec::kUnitBytes;
  const int n_tail = int(k.row_bytes - n_full * Codec::kUnitBytes);
  RowFetch fetch(k);
  for (int t = 0; t < end; t += kTokens) {
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
        fetch.beside(kGroup * Codec::kUnitBytes);
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
    alignas(64) float sums[kAccs];
    reduce_accs(acc, sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) __builtin_memcpy(s + r * kTile + t, sums + r * kTokens, kTokens * sizeof(float));
  }
}

// acc[r] = acc[r] * alpha[r] + sum over tokens [0, end) of p[r][t] * v[t], for U units of the row at `offset`.
template <class Codec, int R, int U, bool kTail>
// Inlined: what it gets are registers, not memory. NOLINTNEXTLINE(readability-function-size)
PKV_INLINE void add_panel(const TileRows& v, RowFetch& fetch, const float* p, const float* alpha, int end,
                          int64_t offset, int n_tail, float* acc, int64_t acc_stride) {
  constexpr int kVecs = U * Codec::kVecs;
  Vec a[R * kVecs];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) a[r * kVecs + c] = mul(load(acc + r * acc_stride + c * kLanes), set1(alpha[r]));
  }
  for (int t = 0; t < end; ++t) {
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
    fetch.beside(U * Codec::kUnitBytes);
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
PKV_INLINE void add_panels(const TileRows& v, RowFetch& fetch, const float* p, const float* alpha, int end,
                           int64_t offset, float* acc, int64_t acc_stride) {
  constexpr int64_t kBytes = U * Codec::kUnitBytes;
  while (v.row_bytes - offset >= kBytes) {
    add_panel<Codec, R, U, false>(v, fetch, p, alpha, end, offset, 0, acc, acc_stride);
    offset += kBytes;
    acc += U * Codec::kVecs * kLanes;
  }
  if constexpr (U > 1) {
    add_panels<Codec, R, U / 2>(v, fetch, p, alpha, end, offset, acc, acc_stride);
  } else if (v.row_bytes > offset) {
    add_panel<Codec, R, 1, true>(v, fetch, p, alpha, end, offset, int(v.row_bytes - offset), acc, acc_stride);
  }
}

//   p  [R, kTile]   alpha  [R]   acc  [R, acc_stride] in lane order
template <class Codec, int R>
void add_rows(const TileRows& v, const float* p, const float* alpha, int end, float* acc, int64_t acc_stride) {
  constexpr int kColumns = tokens_per_block(R) < 8 ? tokens_per_block(R) : 8;
  constexpr int kUnits = kColumns / Codec::kVecs > 0 ? kColumns / Codec::kVecs : 1;
  RowFetch fetch(v);
  add_panels<Codec, R, kUnits>(v, fetch, p, alpha, end, 0, acc, acc_stride);
}

using DotRows = void (*)(const TileRows& k, const float* q, int64_t q_stride, int end, float* s);
using AddRows = void (*)(const TileRows& v, const float* p, const float* alpha, int end, float* acc,
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
