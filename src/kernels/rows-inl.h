// Rows of every format: a storage type begins and ends in this file. Compiled once per instruction set.
//
// A codec gives: kVecs, the Vecs of one unit of a row; kUnitBytes; load(), the unit as floats, without the scale.
// A unit's lanes are the row's elements in order, except for q4: even elements first, then odd ones. The order in
// registers is called lane order; lane_of() maps an element to its place there.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace pagedkv::kernels::PKV_ISA {
namespace {

struct F32Codec {
  static constexpr int kVecs = 1, kUnitBytes = kLanes * 4;
  static PKV_INLINE void load(const uint8_t* p, Vec* v) { v[0] = PKV_ISA::load(reinterpret_cast<const float*>(p)); }
};
struct F16Codec {
  static constexpr int kVecs = 1, kUnitBytes = kLanes * 2;
  static PKV_INLINE void load(const uint8_t* p, Vec* v) { v[0] = load_f16(p); }
};
struct BF16Codec {
  static constexpr int kVecs = 1, kUnitBytes = kLanes * 2;
  static PKV_INLINE void load(const uint8_t* p, Vec* v) { v[0] = load_bf16(p); }
};
struct Q8Codec {
  static constexpr int kVecs = 1, kUnitBytes = kLanes;
  static PKV_INLINE void load(const uint8_t* p, Vec* v) { v[0] = load_i8(p); }
};
struct Q6Codec {
  static constexpr int kVecs = 1, kUnitBytes = kLanes * 3 / 4;
  static PKV_INLINE void load(const uint8_t* p, Vec* v) { v[0] = load_q6(p); }
};
struct Q4Codec {
  static constexpr int kVecs = 2, kUnitBytes = kLanes;
  static PKV_INLINE void load(const uint8_t* p, Vec* v) { load_q4(p, v); }
};

// The last, shorter unit of a row: copied first, so that nothing past the row is touched.
template <class Codec>
PKV_INLINE void load_tail(const uint8_t* p, int n_bytes, Vec* v) {
  uint8_t unit[64] = {};
  static_assert(Codec::kUnitBytes <= int(sizeof unit));
  for (int i = 0; i < n_bytes; ++i) unit[i] = p[i];
  Codec::load(unit, v);
}

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

constexpr int vecs_per_unit(Format format) { return format == Format::kQ4 ? 2 : 1; }
// Floats that a row takes in lane order, zero-filled.
constexpr int64_t padded_dim(Format format, int64_t head_dim) {
  return round_up(head_dim, vecs_per_unit(format) * kLanes);
}
PKV_INLINE int64_t lane_of(Format format, int64_t element) {
  if (format != Format::kQ4) return element;
  const int64_t in_unit = element % (2 * kLanes);
  return element - in_unit + in_unit / 2 + (in_unit % 2) * kLanes;
}

// Codes of one register of bytes, and where the int8 path's interleaving puts a channel (codes-inl.h).
constexpr int kUnit = 4 * kLanes;
PKV_INLINE int64_t zipped_lane(int64_t channel) {
  const int64_t i = channel % kUnit;
  return channel - i + i / 4 % 4 * kLanes + i / 16 * 4 + i % 4;
}

PKV_INLINE int64_t packed_bytes(Format format, int64_t head_dim) { return row_bytes(format, head_dim).n; }
constexpr bool has_scales(Format format) {
  return format == Format::kQ8 || format == Format::kQ6 || format == Format::kQ4;
}

// One packed row as padded_dim floats in lane order, without its scale.
template <class Codec>
void decode_row(const uint8_t* row, int64_t row_bytes, float* out) {
  const int64_t full = row_bytes / Codec::kUnitBytes;
  Vec v[Codec::kVecs];
  for (int64_t u = 0; u < full; ++u) {
    Codec::load(row + u * Codec::kUnitBytes, v);
    for (int i = 0; i < Codec::kVecs; ++i) store(out + (u * Codec::kVecs + i) * kLanes, v[i]);
  }
  const int tail = int(row_bytes - full * Codec::kUnitBytes);
  if (tail == 0) return;
  load_tail<Codec>(row + full * Codec::kUnitBytes, tail, v);
  for (int i = 0; i < Codec::kVecs; ++i) store(out + (full * Codec::kVecs + i) * kLanes, v[i]);
}

using DecodeRow = void (*)(const uint8_t* row, int64_t row_bytes, float* out);
DecodeRow decoder_of(Format format) {
  switch (format) {
    case Format::kF32:
      return decode_row<F32Codec>;
    case Format::kF16:
      return decode_row<F16Codec>;
    case Format::kBF16:
      return decode_row<BF16Codec>;
    case Format::kQ8:
      return decode_row<Q8Codec>;
    case Format::kQ6:
      return decode_row<Q6Codec>;
    case Format::kQ4:
      return decode_row<Q4Codec>;
  }
  return nullptr;
}

// --- encoding ----------------------------------------------------------------------------------------------------

constexpr float kScaleFloor = 1e-6f;
constexpr float kLargestF16 = 65504.0f;
constexpr float kLargestBF16 = 0x1.fep127f;

// A row on its way into the store: head_dim floats, zeros up to the next multiple of 16.
struct RowBuffer {
  alignas(64) float x[kMaxHeadDim + 16];
};

struct EncodeCounts {
  int64_t floor_clamped = 0;  // rows with a value, all of them too small for a scale above the floor
  int64_t saturated = 0;      // finite values past the largest f16 or bf16
};

PKV_INLINE int qmax_of(Format format) { return format == Format::kQ8 ? 127 : format == Format::kQ6 ? 31 : 7; }

PKV_INLINE void copy_bytes(uint8_t* to, const void* from, int64_t n) { __builtin_memcpy(to, from, size_t(n)); }

PKV_INLINE bool is_finite_row(const RowBuffer& row, int64_t head_dim) {
  bool bad = false;
  for (int64_t i = 0; i < head_dim; i += kLanes) bad |= any_not_finite(load(row.x + i));
  return !bad;
}

// clip(round(x / scale)). The quotient is a true one, so that every entry makes the same bytes.
PKV_INLINE void quantize_row(const RowBuffer& row, int64_t head_dim, Format format, uint8_t* out, float* scale,
                             EncodeCounts& counts) {
  const int qmax = qmax_of(format);
  Vec largest = zero();
  for (int64_t i = 0; i < head_dim; i += kLanes) largest = max(largest, abs(load(row.x + i)));
  const float top = reduce_max(largest);
  const float wanted = top / float(qmax);
  counts.floor_clamped += top > 0 && wanted < kScaleFloor;
  const float s = wanted < kScaleFloor ? kScaleFloor : wanted;
  *scale = s;

  alignas(64) int8_t codes[kMaxHeadDim + 16];
  const Vec divisor = set1(s), hi = set1(float(qmax)), lo = set1(float(-qmax));
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    store_i8(codes + i, min(max(round_even(div(load(row.x + i), divisor)), lo), hi));
  }
  if (format == Format::kQ8) {
    copy_bytes(out, codes, head_dim);
  } else if (format == Format::kQ6) {
    for (int64_t i = 0; i < head_dim; i += 4) {
      const uint32_t bits = uint32_t(codes[i] + 32) | uint32_t(codes[i + 1] + 32) << 6 |
                            uint32_t(codes[i + 2] + 32) << 12 | uint32_t(codes[i + 3] + 32) << 18;
      uint8_t* three = out + i / 4 * 3;
      three[0] = uint8_t(bits);
      three[1] = uint8_t(bits >> 8);
      three[2] = uint8_t(bits >> 16);
    }
  } else {
    if (head_dim % 2 != 0) codes[head_dim] = 0;
    for (int64_t i = 0; i < head_dim; i += 2) {
      out[i / 2] = uint8_t((codes[i] + 8) | (codes[i + 1] + 8) << 4);
    }
  }
}

template <bool kBF16>
PKV_INLINE void encode_half_row(const RowBuffer& row, int64_t head_dim, uint8_t* out, EncodeCounts& counts) {
  const float limit = kBF16 ? kLargestBF16 : kLargestF16;
  const Vec hi = set1(limit), lo = set1(-limit);
  alignas(64) uint8_t packed[2 * (kMaxHeadDim + 16)];
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    const Vec x = load(row.x + i);
    counts.saturated += count_less(hi, abs(x));
    const Vec clamped = min(max(x, lo), hi);
    kBF16 ? store_bf16(packed + 2 * i, clamped) : store_f16(packed + 2 * i, clamped);
  }
  copy_bytes(out, packed, 2 * head_dim);
}

// Requires: the row is finite.   scale: written for quantized formats only.
void encode_row(const RowBuffer& row, int64_t head_dim, Format format, uint8_t* out, float* scale,
                EncodeCounts& counts) {
  switch (format) {
    case Format::kF32:
      return copy_bytes(out, row.x, 4 * head_dim);
    case Format::kF16:
      return encode_half_row<false>(row, head_dim, out, counts);
    case Format::kBF16:
      return encode_half_row<true>(row, head_dim, out, counts);
    case Format::kQ8:
    case Format::kQ6:
    case Format::kQ4:
      return quantize_row(row, head_dim, format, out, scale, counts);
  }
}

}  // namespace
}  // namespace pagedkv::kernels::PKV_ISA
