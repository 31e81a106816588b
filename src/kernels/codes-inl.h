// The int8 path: products over the stored codes themselves. Compiled once per instruction set.
//
// A query row is rounded to integers once an item; its products with a tile's codes are integers, so they are exact
// and their order means nothing. Weights (p times V's scale) are rounded to steps of the tile's largest, again for
// exact integer sums. Where the format keeps 8 bits, one more rounding to 8 bits would lose as much again: there
// queries and weights have 15 bits, in two planes of bytes (value = 128 * plane 0 + plane 1). The other formats
// take one plane. docs/numerics.md has what this costs.
//
// A unit is kUnit codes: one register of bytes, summed four by four into kLanes integers. Wherever rows were
// interleaved on the way, channels come out in zipped order: within a unit, channel 16q + 4c + j is lane 4q + j of
// vector c.
#pragma once

#include "kernels/tile-inl.h"

namespace pagedkv::kernels::PKV_ISA {
namespace {

struct Q8Codes {
  static constexpr int kPlanes = 2;
  static constexpr int kUnitBytes = kUnit, kBias = 0;
  static constexpr int kQueryBias = kSignedBias;       // what dot() adds to each code
  static constexpr float kWeights = kMaxWeight * 128;  // largest weight
  static PKV_INLINE Codes load(const uint8_t* p) { return load_q8_codes(p); }
  static PKV_INLINE Ints dot(Ints sum, Codes k, Codes q) { return dot_signed(sum, k, q); }
  // The same in two steps: what of it needs the keys alone, and the rest.
  static PKV_INLINE Codes prepared(Codes k) { return prepare_signed(k); }
  static PKV_INLINE Ints dot_prepared(Ints sum, Codes k, Codes q) { return dot_prepared_signed(sum, k, q); }
};
struct Q6Codes {
  static constexpr int kPlanes = 1;
  static constexpr int kUnitBytes = kUnit * 3 / 4, kBias = 32, kQueryBias = kBias;
  static constexpr float kWeights = 255;  // times a code of 6 bits: no pair of products leaves 16 bits
  static PKV_INLINE Codes load(const uint8_t* p) { return load_q6_codes(p); }
  static PKV_INLINE Ints dot(Ints sum, Codes k, Codes q) { return dot_unsigned(sum, k, q); }
  static PKV_INLINE Codes prepared(Codes k) { return k; }
  static PKV_INLINE Ints dot_prepared(Ints sum, Codes k, Codes q) { return dot_unsigned(sum, k, q); }
};
struct Q4Codes {
  static constexpr int kPlanes = 1;
  static constexpr int kUnitBytes = kUnit / 2, kBias = 8, kQueryBias = kBias;
  static constexpr float kWeights = 255;
  static PKV_INLINE Codes load(const uint8_t* p) { return load_q4_codes(p); }
  static PKV_INLINE Ints dot(Ints sum, Codes k, Codes q) { return dot_unsigned(sum, k, q); }
  static PKV_INLINE Codes prepared(Codes k) { return k; }
  static PKV_INLINE Ints dot_prepared(Ints sum, Codes k, Codes q) { return dot_unsigned(sum, k, q); }
};

// The last, shorter units of rows [0, end), zero-filled: nothing past a row is touched. Rows of whole units:
// nothing. Not inline: a call among the products would cost them their registers.
template <class Codec>
__attribute__((noinline)) void copy_tails(const TileRows& from, int end, uint8_t* tails) {
  const int n = int(from.row_bytes % Codec::kUnitBytes);
  if (n == 0) return;
  for (int t = 0; t < end; ++t) {
    const uint8_t* row = from.rows[t] + from.row_bytes - n;
    uint8_t* to = tails + t * Codec::kUnitBytes;
    for (int i = 0; i < n; ++i) to[i] = row[i];
    for (int i = n; i < Codec::kUnitBytes; ++i) to[i] = 0;
  }
}

constexpr int64_t padded_codes(int64_t head_dim) { return round_up(head_dim, kUnit); }

constexpr int planes_of(Format format) { return format == Format::kQ8 ? Q8Codes::kPlanes : 1; }

// Query rows as integers. Value = code * scale.
struct QueryCodes {
  const uint8_t* codes;  // [rows][planes][plane_bytes], zeros behind head_dim
  const uint8_t*
      spread;  // [rows][planes][4 * plane_bytes]: each unit four times, vector c having dword c of each quarter
  const float* scale;  // [rows]
  const int32_t* sum;  // [rows] of the codes
  int64_t plane_bytes;
};

// One row of q * factor. Requires room for `planes` times padded_codes(head_dim) codes and four times that. A row
// with a NaN or an infinity gets the scale NaN, so that its scores are NaN.
PKV_INLINE void encode_query(const float* q, int64_t head_dim, float factor, int planes, uint8_t* codes,
                             uint8_t* spread, float* scale, int32_t* sum) {
  const int64_t padded = padded_codes(head_dim);
  const float largest_code = planes == 2 ? 127.0f * 128.0f : 127.0f;
  alignas(64) float x[kMaxHeadDim];
  __builtin_memcpy(x, q, size_t(head_dim) * sizeof(float));
  for (int64_t i = head_dim; i < padded; ++i) x[i] = 0;
  Vec largest = zero();
  bool bad = false;
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec v = mul(load(x + i), set1(factor));
    bad |= any_not_finite(v);
    store(x + i, v);
    largest = max(largest, abs(v));
  }
  const float top = reduce_max(largest);
  const Vec inverse = set1(!bad && top > 1e-30f ? largest_code / top : 0.0f);
  int8_t* out = reinterpret_cast<int8_t*>(codes);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Vec code = round_even(mul(bad ? zero() : load(x + i), inverse));
    if (planes == 2) {
      const Vec high = round_even(mul(code, set1(1.0f / 128.0f)));
      store_i8(out + i, high);
      store_i8(out + padded + i, fma(high, set1(-128.0f), code));
    } else {
      store_i8(out + i, code);
    }
  }
  *scale = bad ? __builtin_nanf("") : top / largest_code;
  const uint8_t ones[4] = {1, 1, 1, 1};
  *sum = 0;
  for (int plane = 0; plane < planes; ++plane) {
    Ints total = no_ints();
    for (int64_t u = plane * padded; u < (plane + 1) * padded; u += kUnit) {
      const Codes unit = load_codes(codes + u);
      total = dot_unsigned(total, repeat4(ones), unit);
      store_codes(spread + 4 * u, spread_dword<0>(unit));
      store_codes(spread + 4 * u + kUnit, spread_dword<1>(unit));
      store_codes(spread + 4 * u + 2 * kUnit, spread_dword<2>(unit));
      store_codes(spread + 4 * u + 3 * kUnit, spread_dword<3>(unit));
    }
    *sum = *sum * 128 + sum_ints(total);
  }
}

// Unit u of N rows into the L2 cache, its share `part` of `parts`; of rows that lie one behind the other in each
// quarter, the u-th piece of as many bytes. A line from each quarter in turn.
template <class Codec, int N>
PKV_INLINE void fetch_unit(const uint8_t* const* rows, bool adjacent, int64_t u, int part, int parts) {
  constexpr int kBytes = N / 4 * Codec::kUnitBytes, kLines = (kBytes + 63) / 64 * 4;
  if (adjacent) {
    for (int i = kLines * part / parts; i < kLines * (part + 1) / parts; ++i)
      prefetch(rows[i % 4] + u * kBytes + i / 4 * 64);
  } else {
    for (int i = N * part / parts; i < N * (part + 1) / parts; ++i) prefetch(rows[i] + u * Codec::kUnitBytes);
  }
}

// The value of N sums in planes: [plane][N] to [N]. Sums of 15-bit codes may pass 2^31 on the way: they come back,
// as integers that wrap do, once the bias is off.
template <int kPlanes, int N>
PKV_INLINE void join_planes(const Ints* sums, Ints* joined) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) joined[i] = kPlanes == 1 ? sums[i] : add_shifted7(sums[i], sums[N + i]);
}

// s[r][t] = q[r] . k[t], without K's scales, for R rows and tokens [0, end), rounded out to kLanes.
template <class Codec, int R>
void dot_codes(const TileRows& k, const QueryCodes& q, int end, float* s) {
  constexpr int kPlanes = Codec::kPlanes;
  const int64_t n_full = k.row_bytes / Codec::kUnitBytes, n_units = q.plane_bytes / kUnit;
  // Quarters that go through the registers together: their rows, and sums of R rows for each.
  constexpr int kTogether = R * kPlanes > 2 && kQuarters > 2 ? 2 : kQuarters;
  constexpr int kRows = 4 * kTogether;
  alignas(64) uint8_t tails[kTile * Codec::kUnitBytes];
  copy_tails<Codec>(k, int(round_up(end, kLanes)), tails);
  for (int t = 0; t < end; t += kLanes) {
    Ints sums[R * kQuarters];
#pragma GCC unroll 2
    for (int first = 0; first < kQuarters; first += kTogether) {
      const uint8_t* const* rows = k.rows + t + 4 * first;
      const uint8_t* const* ahead = k.ahead + t + 4 * first;
      Ints part[kPlanes * R * kTogether];
#pragma GCC unroll 16
      for (Ints& sum : part) sum = no_ints();
      for (int64_t u = 0; u < n_units; ++u) {
        Codes x[kRows];
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
          x[i] = Codec::load(u < n_full ? rows[i] + u * Codec::kUnitBytes
                                        : tails + (t + 4 * first + i) * Codec::kUnitBytes);
          hold(x[i]);
        }
#pragma GCC unroll 4
        for (int g = 0; g < kTogether; ++g) transpose_dwords(x + 4 * g);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          // A share of the lines with each row: many at once would hold up the loads between them.
          if (k.ahead != nullptr) fetch_unit<Codec, kRows>(ahead, k.adjacent, u, r, R);
#pragma GCC unroll 2
          for (int plane = 0; plane < kPlanes; ++plane) {
            const uint8_t* spread = q.spread + ((r * kPlanes + plane) * q.plane_bytes + u * kUnit) * 4;
            Ints* to = part + (plane * R + r) * kTogether;
#pragma GCC unroll 4
            for (int c = 0; c < 4; ++c) {
              Codes qc = load_codes(spread + c * kUnit);
              hold(qc);
#pragma GCC unroll 4
              for (int g = 0; g < kTogether; ++g) to[g] = Codec::dot(to[g], x[4 * g + c], qc);
            }
          }
        }
      }
      join_planes<kPlanes, R * kTogether>(part, part);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < kTogether; ++g) sums[r * kQuarters + first + g] = part[r * kTogether + g];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vec sum = to_floats(fold_quarters_of(sums + r * kQuarters), Codec::kQueryBias * q.sum[r]);
      store(s + r * kTile + t, mul(sum, set1(q.scale[r])));
    }
  }
}

// All four vectors of a unit.
PKV_INLINE void zip(Codes* x) {
  Codes high[4] = {x[0], x[1], x[2], x[3]};
  zip_low(x);
  zip_high(high);
  x[2] = high[0];
  x[3] = high[1];
}

// Weights of a tile as integers. Value = code * scale.
struct WeightCodes {
  uint8_t* codes;  // [planes][kBlockRows][kTile], 0 for what a row does not see
  float* scale;    // [rows]

  static constexpr int kPlane = kBlockRows * kTile;
};

// Vectors of a unit's channels that go through the registers together: two where there are two planes of sums.
template <class Codec, int R>
constexpr int kVecsTogether = Codec::kPlanes* R * 4 <= kAccs ? 4 : 2;

// sums[plane][r][c] += four tokens' weights of row r with their zipped values x[c], for V vectors.
template <int kPlanes, int R, int V>
PKV_INLINE void add_weighted(const Codes* x, const uint8_t* weights, Ints* sums) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int plane = 0; plane < kPlanes; ++plane) {
      const Codes four = repeat4(weights + plane * WeightCodes::kPlane + r * kTile);
      Ints* to = sums + (plane * R + r) * V;
#pragma GCC unroll 4
      for (int c = 0; c < V; ++c) to[c] = dot_unsigned(to[c], four, x[c]);
    }
  }
}
// acc[r] = acc[r] * alpha[r] + (sums[r] - less[r]) * scale[r], V vectors of channels.
template <int kPlanes, int R, int V>
PKV_INLINE void close_sums(Ints* sums, const int32_t* less, const float* scale, const float* alpha, float* acc,
                           int64_t acc_stride) {
  join_planes<kPlanes, R * V>(sums, sums);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < V; ++c) {
      float* at = acc + r * acc_stride + c * kLanes;
      store(at, fma(to_floats(sums[r * V + c], less[r]), set1(scale[r]), mul(load(at), set1(alpha[r]))));
    }
  }
}
template <class Codec, int R>
PKV_INLINE void sum_weights(const WeightCodes& w, int32_t* less) {
  static_assert(Codec::kBias == 0 || Codec::kPlanes == 1);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) less[r] = Codec::kBias == 0 ? 0 : Codec::kBias * sum_u8(w.codes + r * kTile, kTile);
}

// Eight rows of a tile to come at a time, unit by unit, each in kParts steps: in the order of addresses, whatever
// is read meanwhile.
template <class Codec, int kParts>
struct Fetch {
  const uint8_t* const* rows;  // null: nothing to fetch
  bool adjacent;
  int64_t n_units;
  int64_t unit = 0;
  int row = 0, part = 0;

  PKV_INLINE void next() {
    if (rows == nullptr || row >= kTile) return;
    fetch_unit<Codec, 8>(rows + row, adjacent, unit, part, kParts);
    if (++part < kParts) return;
    part = 0;
    if (++unit == n_units) {
      unit = 0;
      row += 8;
    }
  }
};

// Vectors [kFirst, kFirst + kVecsTogether) of a unit's channels, of rows that hold the unit at `offset`.
template <class Codec, int R, int kFirst>
// Inlined: what it gets are registers, not memory. NOLINTNEXTLINE(readability-function-size)
PKV_INLINE void add_part(const uint8_t* const* rows, int64_t offset,
                         Fetch<Codec, 8 / kVecsTogether<Codec, R>>& fetch, const WeightCodes& w,
                         const int32_t* less, const float* alpha, int end, float* acc, int64_t acc_stride) {
  constexpr int kVecs = kVecsTogether<Codec, R>;
  Ints sums[Codec::kPlanes * R * kVecs];
#pragma GCC unroll 16
  for (Ints& sum : sums) sum = no_ints();
  for (int t = 0; t < end; t += 4) {
    Codes x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      x[i] = Codec::load(rows[t + i] + offset);
      hold(x[i]);
    }
    if (kVecs == 4) {
      zip(x);
    } else {
      kFirst == 0 ? zip_low(x) : zip_high(x);
    }
    fetch.next();
    add_weighted<Codec::kPlanes, R, kVecs>(x, w.codes + t, sums);
  }
  close_sums<Codec::kPlanes, R, kVecs>(sums, less, w.scale, alpha, acc + kFirst * kLanes, acc_stride);
}
template <class Codec, int R>
// Inlined: what it gets are registers, not memory. NOLINTNEXTLINE(readability-function-size)
PKV_INLINE void add_unit(const uint8_t* const* rows, int64_t offset,
                         Fetch<Codec, 8 / kVecsTogether<Codec, R>>& fetch, const WeightCodes& w,
                         const int32_t* less, const float* alpha, int end, float* acc, int64_t acc_stride) {
  add_part<Codec, R, 0>(rows, offset, fetch, w, less, alpha, end, acc, acc_stride);
  if constexpr (kVecsTogether<Codec, R> == 2)
    add_part<Codec, R, 2>(rows, offset, fetch, w, less, alpha, end, acc, acc_stride);
}

// acc[r] = acc[r] * alpha[r] + sum over tokens [0, end) of w[r][t] * v[t], in zipped order.
template <class Codec, int R>
void add_codes(const TileRows& v, const WeightCodes& w, const float* alpha, int end, float* acc,
               int64_t acc_stride) {
  const int64_t n_full = v.row_bytes / Codec::kUnitBytes, n_units = acc_stride / kUnit;
  int32_t less[R];
  sum_weights<Codec, R>(w, less);
  Fetch<Codec, 8 / kVecsTogether<Codec, R>> fetch{v.ahead, v.adjacent, n_units};
  for (int64_t u = 0; u < n_full; ++u, acc += kUnit) {
    add_unit<Codec, R>(v.rows, u * Codec::kUnitBytes, fetch, w, less, alpha, end, acc, acc_stride);
  }
  if (n_full == n_units) return;
  alignas(64) uint8_t tails[kTile * Codec::kUnitBytes];
  copy_tails<Codec>(v, int(round_up(end, 4)), tails);
  const uint8_t* rows[kTile];
  for (int t = 0; t < kTile; ++t) rows[t] = tails + t * Codec::kUnitBytes;
  add_unit<Codec, R>(rows, 0, fetch, w, less, alpha, end, acc, acc_stride);
}

// --- panels: a tile's codes laid out once for the many rows of a prompt ------------------------------------------

// Keys with tokens side by side: [dwords of a row][kTile] dwords.
template <class Codec>
void lay_out_keys(const TileRows& k, uint8_t* panel) {
  alignas(64) uint8_t tails[kTile * Codec::kUnitBytes];
  copy_tails<Codec>(k, kTile, tails);
  const int64_t n_full = k.row_bytes / Codec::kUnitBytes;
  for (int t = 0; t < kTile; t += kLanes) {
    for (int64_t u = 0; u * Codec::kUnitBytes < k.row_bytes; ++u) {
      Codes x[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x[i] = Codec::prepared(
            Codec::load(u < n_full ? k.rows[t + i] + u * Codec::kUnitBytes : tails + (t + i) * Codec::kUnitBytes));
      }
      transpose_square(x);
      for (int i = 0; i < kLanes; ++i) store_codes(panel + ((u * kLanes + i) * kTile + t) * 4, x[i]);
    }
  }
}

// Values as add_codes() wants them in registers: [units][kTile / 4][4][kUnit].
template <class Codec>
void lay_out_values(const TileRows& v, uint8_t* panel) {
  alignas(64) uint8_t tails[kTile * Codec::kUnitBytes];
  copy_tails<Codec>(v, kTile, tails);
  const int64_t n_full = v.row_bytes / Codec::kUnitBytes;
  for (int64_t u = 0; u * Codec::kUnitBytes < v.row_bytes; ++u) {
    for (int t = 0; t < kTile; t += 4) {
      Codes x[4];
      for (int i = 0; i < 4; ++i) {
        x[i] =
            Codec::load(u < n_full ? v.rows[t + i] + u * Codec::kUnitBytes : tails + (t + i) * Codec::kUnitBytes);
      }
      zip(x);
      for (int c = 0; c < 4; ++c) store_codes(panel + (u * kTile + t + c) * kUnit, x[c]);
    }
  }
}

// As dot_codes(), R rows in one plane or R / 2 in two at once.
template <class Codec, int R>
void dot_key_panel(const uint8_t* panel, const QueryCodes& q, int end, float* s) {
  constexpr int kPlanes = Codec::kPlanes;
  constexpr int kVecs = kTile / kLanes < 4 ? kTile / kLanes : 4;
  constexpr int kMostRows = 4 / kPlanes;
  constexpr int kRows = R < kMostRows ? R : kMostRows;
  for (int t = 0; t < end; t += kVecs * kLanes) {
#pragma GCC unroll 2
    for (int first = 0; first < R; first += kRows) {
      Ints sums[kPlanes * kRows * kVecs];
#pragma GCC unroll 16
      for (Ints& sum : sums) sum = no_ints();
      const uint8_t* codes = q.codes + first * kPlanes * q.plane_bytes;
      for (int64_t i = 0; i < q.plane_bytes; i += 4) {
        Codes x[kVecs];
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) {
          x[j] = load_codes(panel + i * kTile + (t + j * kLanes) * 4);
          hold(x[j]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          if (first + r >= R) continue;
#pragma GCC unroll 2
          for (int plane = 0; plane < kPlanes; ++plane) {
            Codes dword = repeat4(codes + (r * kPlanes + plane) * q.plane_bytes + i);
            hold(dword);
            Ints* to = sums + (plane * kRows + r) * kVecs;
#pragma GCC unroll 4
            for (int j = 0; j < kVecs; ++j) to[j] = Codec::dot_prepared(to[j], x[j], dword);
          }
        }
      }
      join_planes<kPlanes, kRows * kVecs>(sums, sums);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        if (first + r >= R) continue;
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) {
          const Vec sum = to_floats(sums[r * kVecs + j], Codec::kQueryBias * q.sum[first + r]);
          store(s + (first + r) * kTile + t + j * kLanes, mul(sum, set1(q.scale[first + r])));
        }
      }
    }
  }
}

// As add_codes(), for rows of n_units units.
template <class Codec, int R>
void add_value_panel(const uint8_t* panel, int64_t n_units, const WeightCodes& w, const float* alpha, int end,
                     float* acc, int64_t acc_stride) {
  int32_t less[R];
  sum_weights<Codec, R>(w, less);
  constexpr int kVecs = kVecsTogether<Codec, R>;
  for (int64_t first = 0; first < 4 * n_units; first += kVecs) {
    const uint8_t* unit = panel + (first / 4 * kTile + first % 4) * kUnit;
    Ints sums[Codec::kPlanes * R * kVecs];
#pragma GCC unroll 16
    for (Ints& sum : sums) sum = no_ints();
    for (int t = 0; t < end; t += 4) {
      Codes x[kVecs];
#pragma GCC unroll 4
      for (int c = 0; c < kVecs; ++c) {
        x[c] = load_codes(unit + (t + c) * kUnit);
        hold(x[c]);
      }
      add_weighted<Codec::kPlanes, R, kVecs>(x, w.codes + t, sums);
    }
    close_sums<Codec::kPlanes, R, kVecs>(sums, less, w.scale, alpha, acc + first * kLanes, acc_stride);
  }
}

using DotCodes = void (*)(const TileRows& k, const QueryCodes& q, int end, float* s);
using AddCodes = void (*)(const TileRows& v, const WeightCodes& w, const float* alpha, int end, float* acc,
                          int64_t acc_stride);

using LayOut = void (*)(const TileRows& rows, uint8_t* panel);
using DotPanel = void (*)(const uint8_t* panel, const QueryCodes& q, int end, float* s);
using AddPanel = void (*)(const uint8_t* panel, int64_t n_units, const WeightCodes& w, const float* alpha, int end,
                          float* acc, int64_t acc_stride);

// The products for 1 to kBlockRows rows.
struct CodeProducts {
  DotCodes dot[kBlockRows];
  AddCodes add[kBlockRows];
  LayOut lay_out_keys, lay_out_values;
  DotPanel dot_panel[kBlockRows];
  AddPanel add_panel[kBlockRows];
  float max_weight;
};
template <class Codec>
constexpr CodeProducts kCodeProducts = {
    {dot_codes<Codec, 1>, dot_codes<Codec, 2>, dot_codes<Codec, 3>, dot_codes<Codec, 4>},
    {add_codes<Codec, 1>, add_codes<Codec, 2>, add_codes<Codec, 3>, add_codes<Codec, 4>},
    lay_out_keys<Codec>,
    lay_out_values<Codec>,
    {dot_key_panel<Codec, 1>, dot_key_panel<Codec, 2>, dot_key_panel<Codec, 3>, dot_key_panel<Codec, 4>},
    {add_value_panel<Codec, 1>, add_value_panel<Codec, 2>, add_value_panel<Codec, 3>, add_value_panel<Codec, 4>},
    Codec::kWeights,
};
// Requires: has_scales(format).
const CodeProducts& code_products_of(Format format) {
  if (format == Format::kQ8) return kCodeProducts<Q8Codes>;
  return format == Format::kQ6 ? kCodeProducts<Q6Codes> : kCodeProducts<Q4Codes>;
}

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
