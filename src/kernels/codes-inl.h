// The int8 path: products over the stored codes themselves. Compiled once per instruction set.
//
// A query row is rounded to int8 once an item; its products with a tile's codes are integers, so they are exact and
// their order means nothing. Weights (p times V's scale) are rounded to kMaxWeight steps of the tile's largest,
// again for exact integer sums. What each rounding costs is in docs/numerics.md.
//
// A unit is kUnit codes: one register of bytes, summed four by four into kLanes integers. Wherever rows were
// interleaved on the way, channels come out in zipped order: within a unit, channel 16q + 4c + j is lane 4q + j of
// vector c.
#pragma once

#include "kernels/tile-inl.h"

namespace pagedkv::kernels::PKV_ISA {
namespace {

constexpr int kQuarters = kLanes / 4;  // of a register: groups of four tokens side by side

struct Q8Codes {
  static constexpr int kUnitBytes = kUnit, kBias = 0;
  static constexpr int kQueryBias = kSignedBias;  // what dot() adds to each code
  static constexpr float kWeights = kMaxWeight;
  static PKV_INLINE Codes load(const uint8_t* p) { return load_q8_codes(p); }
  static PKV_INLINE Ints dot(Ints sum, Codes k, Codes q) { return dot_signed(sum, k, q); }
  // The same in two steps: what of it needs the keys alone, and the rest.
  static PKV_INLINE Codes prepared(Codes k) { return prepare_signed(k); }
  static PKV_INLINE Ints dot_prepared(Ints sum, Codes k, Codes q) { return dot_prepared_signed(sum, k, q); }
};
struct Q6Codes {
  static constexpr int kUnitBytes = kUnit * 3 / 4, kBias = 32, kQueryBias = kBias;
  static constexpr float kWeights = 255;  // times a code of 6 bits: no pair of products leaves 16 bits
  static PKV_INLINE Codes load(const uint8_t* p) { return load_q6_codes(p); }
  static PKV_INLINE Ints dot(Ints sum, Codes k, Codes q) { return dot_unsigned(sum, k, q); }
  static PKV_INLINE Codes prepared(Codes k) { return k; }
  static PKV_INLINE Ints dot_prepared(Ints sum, Codes k, Codes q) { return dot_unsigned(sum, k, q); }
};
struct Q4Codes {
  static constexpr int kUnitBytes = kUnit / 2, kBias = 8, kQueryBias = kBias;
  static constexpr float kWeights = 255;
  static PKV_INLINE Codes load(const uint8_t* p) { return load_q4_codes(p); }
  static PKV_INLINE Ints dot(Ints sum, Codes k, Codes q) { return dot_unsigned(sum, k, q); }
  static PKV_INLINE Codes prepared(Codes k) { return k; }
  static PKV_INLINE Ints dot_prepared(Ints sum, Codes k, Codes q) { return dot_unsigned(sum, k, q); }
};

// The last, shorter unit of a row; nothing past the row is touched.
template <class Codec>
PKV_INLINE Codes load_codes_tail(const uint8_t* p, int n_bytes) {
  alignas(64) uint8_t unit[Codec::kUnitBytes] = {};
  for (int i = 0; i < n_bytes; ++i) unit[i] = p[i];
  return Codec::load(unit);
}

constexpr int64_t padded_codes(int64_t head_dim) { return round_up(head_dim, kUnit); }

// Query rows as int8. Value = code * scale.
struct QueryCodes {
  const uint8_t* codes;   // [rows, row_bytes], zeros behind head_dim
  const uint8_t* spread;  // [rows, 4 * row_bytes]: each unit four times, vector c having dword c of each quarter
  const float* scale;     // [rows]
  const int32_t* sum;     // [rows] of the codes
  int64_t row_bytes;
};

// One row of q * factor. Requires room for padded_codes(head_dim) codes and four times that. A row with a NaN or an
// infinity gets the scale NaN, so that its scores are NaN.
PKV_INLINE void encode_query(const float* q, int64_t head_dim, float factor, uint8_t* codes, uint8_t* spread,
                             float* scale, int32_t* sum) {
  const int64_t padded = padded_codes(head_dim);
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
  const float inverse = top > 1e-30f ? 127.0f / top : 0.0f;
  int8_t* out = reinterpret_cast<int8_t*>(codes);
  for (int64_t i = 0; i < padded; i += kLanes)
    store_i8(out + i, bad ? zero() : round_even(mul(load(x + i), set1(inverse))));
  Ints total = no_ints();
  const uint8_t ones[4] = {1, 1, 1, 1};
  for (int64_t u = 0; u < padded; u += kUnit) {
    const Codes x = load_codes(codes + u);
    total = dot_unsigned(total, repeat4(ones), x);
    store_codes(spread + 4 * u, spread_dword<0>(x));
    store_codes(spread + 4 * u + kUnit, spread_dword<1>(x));
    store_codes(spread + 4 * u + 2 * kUnit, spread_dword<2>(x));
    store_codes(spread + 4 * u + 3 * kUnit, spread_dword<3>(x));
  }
  *scale = bad ? __builtin_nanf("") : top / 127.0f;
  *sum = sum_ints(total);
}

// Unit u of N rows into the L2 cache; of rows that lie one behind the other, the u-th piece of as many bytes.
template <class Codec, int N>
PKV_INLINE void fetch_unit(const uint8_t* const* rows, bool adjacent, int64_t u) {
  if (adjacent) {
    const uint8_t* from = rows[0] + u * (N * Codec::kUnitBytes);
#pragma GCC unroll 16
    for (int i = 0; i < N * Codec::kUnitBytes; i += 64) prefetch(from + i);
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) prefetch(rows[i] + u * Codec::kUnitBytes);
  }
}

// s[r][t] = q[r] . k[t], without K's scales, for R rows and tokens [begin, end), rounded out to kLanes.
template <class Codec, int R>
void dot_codes(const TileRows& k, const QueryCodes& q, int begin, int end, float* s) {
  const int64_t n_full = k.row_bytes / Codec::kUnitBytes;
  const int n_tail = int(k.row_bytes - n_full * Codec::kUnitBytes);
  const int64_t n_units = n_full + (n_tail != 0);
  // Quarters that go through the registers together: their rows, and R sums for each.
  constexpr int kTogether = R > 2 && kQuarters > 2 ? 2 : kQuarters;
  constexpr int kRows = 4 * kTogether;
  begin = begin / kLanes * kLanes;
  for (int t = begin; t < end; t += kLanes) {
    Ints sums[R * kQuarters];
#pragma GCC unroll 2
    for (int first = 0; first < kQuarters; first += kTogether) {
      const uint8_t* const* rows = k.rows + t + 4 * first;
      const uint8_t* const* ahead = k.ahead + t + 4 * first;
      Ints part[R * kTogether];
#pragma GCC unroll 16
      for (Ints& sum : part) sum = no_ints();
      for (int64_t u = 0; u < n_units; ++u) {
        Codes x[kRows];
        if (u < n_full) {
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i) {
            x[i] = Codec::load(rows[i] + u * Codec::kUnitBytes);
            hold(x[i]);
          }
        } else {
          for (int i = 0; i < kRows; ++i) x[i] = load_codes_tail<Codec>(rows[i] + u * Codec::kUnitBytes, n_tail);
        }
#pragma GCC unroll 4
        for (int g = 0; g < kTogether; ++g) transpose_dwords(x + 4 * g);
        if (k.ahead != nullptr) fetch_unit<Codec, kRows>(ahead, k.adjacent, u);
        const uint8_t* spread = q.spread + u * 4 * kUnit;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int c = 0; c < 4; ++c) {
            Codes qc = load_codes(spread + r * 4 * q.row_bytes + c * kUnit);
            hold(qc);
#pragma GCC unroll 4
            for (int g = 0; g < kTogether; ++g)
              part[r * kTogether + g] = Codec::dot(part[r * kTogether + g], x[4 * g + c], qc);
          }
        }
      }
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

// Weights of a tile as integers. Value = code * scale.
struct WeightCodes {
  uint8_t* codes;  // [rows, kTile], 0 for what a row does not see
  float* scale;    // [rows]
};

// sums[r][c] += four tokens' weights of row r with their zipped values x[c].
template <int R>
PKV_INLINE void add_weighted(const Codes* x, const uint8_t* weights, Ints* sums) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const Codes four = repeat4(weights + r * kTile);
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) sums[r * 4 + c] = dot_unsigned(sums[r * 4 + c], four, x[c]);
  }
}
// acc[r] = acc[r] * alpha[r] + (sums[r] - less[r]) * scale[r], one unit of channels.
template <int R>
PKV_INLINE void close_unit(const Ints* sums, const int32_t* less, const float* scale, const float* alpha,
                           float* acc, int64_t acc_stride) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      float* at = acc + r * acc_stride + c * kLanes;
      store(at, fma(to_floats(sums[r * 4 + c], less[r]), set1(scale[r]), mul(load(at), set1(alpha[r]))));
    }
  }
}

// acc[r] = acc[r] * alpha[r] + sum over tokens [begin, end) of w[r][t] * v[t], in zipped order.
template <class Codec, int R>
void add_codes(const TileRows& v, const WeightCodes& w, const float* alpha, int begin, int end, float* acc,
               int64_t acc_stride) {
  const int64_t n_full = v.row_bytes / Codec::kUnitBytes;
  const int n_tail = int(v.row_bytes - n_full * Codec::kUnitBytes);
  const int64_t n_units = n_full + (n_tail != 0);
  begin = begin / 4 * 4;
  int ahead_row = begin;
  int64_t ahead_unit = 0;
  int32_t less[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) less[r] = Codec::kBias == 0 ? 0 : Codec::kBias * sum_u8(w.codes + r * kTile, kTile);
  for (int64_t u = 0; u < n_units; ++u) {
    Ints sums[R * 4];
#pragma GCC unroll 16
    for (Ints& sum : sums) sum = no_ints();
    const int64_t offset = u * Codec::kUnitBytes;
    for (int t = begin; t < end; t += 4) {
      Codes x[4];
      if (u < n_full) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          x[i] = Codec::load(v.rows[t + i] + offset);
          hold(x[i]);
        }
      } else {
        for (int i = 0; i < 4; ++i) x[i] = load_codes_tail<Codec>(v.rows[t + i] + offset, n_tail);
      }
      zip_bytes(x);
      if (v.ahead != nullptr) {
        if (v.adjacent) {  // in the order of addresses, though units are read in another
          fetch_unit<Codec, 4>(v.ahead + ahead_row, true, ahead_unit);
          if (++ahead_unit == n_units) {
            ahead_unit = 0;
            ahead_row = ahead_row < kTile - 4 ? ahead_row + 4 : 0;
          }
        } else {
          fetch_unit<Codec, 4>(v.ahead + t, false, u);
        }
      }
      add_weighted<R>(x, w.codes + t, sums);
    }
    close_unit<R>(sums, less, w.scale, alpha, acc + u * kUnit, acc_stride);
  }
}

// --- panels: a tile's codes laid out once for the many rows of a prompt
// -------------------------------------------

// Unit u of a row, or what is left of it.
template <class Codec>
PKV_INLINE Codes load_unit(const uint8_t* row, int64_t row_bytes, int64_t u) {
  const int64_t left = row_bytes - u * Codec::kUnitBytes;
  if (left >= Codec::kUnitBytes) return Codec::load(row + u * Codec::kUnitBytes);
  return load_codes_tail<Codec>(row + u * Codec::kUnitBytes, int(left));
}

constexpr int kPanelVecs = kTile / kLanes;  // registers of one dword of all tokens

// Keys with tokens side by side: [dwords of a row][kTile] dwords.
template <class Codec>
void lay_out_keys(const TileRows& k, uint8_t* panel) {
  for (int t = 0; t < kTile; t += kLanes) {
    for (int64_t u = 0; u * Codec::kUnitBytes < k.row_bytes; ++u) {
      Codes x[kLanes];
      for (int i = 0; i < kLanes; ++i) x[i] = Codec::prepared(load_unit<Codec>(k.rows[t + i], k.row_bytes, u));
      for (int g = 0; g < kQuarters; ++g) transpose_dwords(x + 4 * g);
      for (int c = 0; c < 4; ++c) {
        Codes quarters[kQuarters];
        for (int g = 0; g < kQuarters; ++g) quarters[g] = x[4 * g + c];
        transpose_quarters(quarters);
        for (int i = 0; i < kQuarters; ++i)
          store_codes(panel + ((u * kLanes + 4 * i + c) * kTile + t) * 4, quarters[i]);
      }
    }
  }
}

// Values as add_codes() wants them in registers: [units][kTile / 4][4][kUnit].
template <class Codec>
void lay_out_values(const TileRows& v, uint8_t* panel) {
  for (int64_t u = 0; u * Codec::kUnitBytes < v.row_bytes; ++u) {
    for (int t = 0; t < kTile; t += 4) {
      Codes x[4];
      for (int i = 0; i < 4; ++i) x[i] = load_unit<Codec>(v.rows[t + i], v.row_bytes, u);
      zip_bytes(x);
      for (int c = 0; c < 4; ++c) store_codes(panel + ((u * kTile + t) + c) * kUnit, x[c]);
    }
  }
}

// As dot_codes().
template <class Codec, int R>
void dot_key_panel(const uint8_t* panel, const QueryCodes& q, int begin, int end, float* s) {
  constexpr int kVecs = kPanelVecs < 4 ? kPanelVecs : 4;
  for (int t = begin / (kVecs * kLanes) * (kVecs * kLanes); t < end; t += kVecs * kLanes) {
    Ints sums[R * kVecs];
#pragma GCC unroll 16
    for (Ints& sum : sums) sum = no_ints();
    for (int64_t i = 0; i < q.row_bytes; i += 4) {
      Codes x[kVecs];
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        x[j] = load_codes(panel + i * kTile + (t + j * kLanes) * 4);
        hold(x[j]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        Codes dword = repeat4(q.codes + r * q.row_bytes + i);
        hold(dword);
#pragma GCC unroll 4
        for (int j = 0; j < kVecs; ++j) sums[r * kVecs + j] = Codec::dot_prepared(sums[r * kVecs + j], x[j], dword);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < kVecs; ++j) {
        const Vec sum = to_floats(sums[r * kVecs + j], Codec::kQueryBias * q.sum[r]);
        store(s + r * kTile + t + j * kLanes, mul(sum, set1(q.scale[r])));
      }
    }
  }
}

// As add_codes(), for rows of n_units units.
template <class Codec, int R>
void add_value_panel(const uint8_t* panel, int64_t n_units, const WeightCodes& w, const float* alpha, int begin,
                     int end, float* acc, int64_t acc_stride) {
  begin = begin / 4 * 4;
  int32_t less[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) less[r] = Codec::kBias == 0 ? 0 : Codec::kBias * sum_u8(w.codes + r * kTile, kTile);
  for (int64_t u = 0; u < n_units; ++u) {
    Ints sums[R * 4];
#pragma GCC unroll 16
    for (Ints& sum : sums) sum = no_ints();
    for (int t = begin; t < end; t += 4) {
      Codes x[4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) {
        x[c] = load_codes(panel + (u * kTile + t + c) * kUnit);
        hold(x[c]);
      }
      add_weighted<R>(x, w.codes + t, sums);
    }
    close_unit<R>(sums, less, w.scale, alpha, acc + u * kUnit, acc_stride);
  }
}

using DotCodes = void (*)(const TileRows& k, const QueryCodes& q, int begin, int end, float* s);
using AddCodes = void (*)(const TileRows& v, const WeightCodes& w, const float* alpha, int begin, int end,
                          float* acc, int64_t acc_stride);

using LayOut = void (*)(const TileRows& rows, uint8_t* panel);
using DotPanel = void (*)(const uint8_t* panel, const QueryCodes& q, int begin, int end, float* s);
using AddPanel = void (*)(const uint8_t* panel, int64_t n_units, const WeightCodes& w, const float* alpha,
                          int begin, int end, float* acc, int64_t acc_stride);

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
