// The formats once more, as slowly and plainly as their definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pagedkv/format.h"
#include "tests/kernels/half.h"

namespace pagedkv {

struct NaiveRow {
  std::vector<uint8_t> bytes;
  float scale = 0;
};

inline NaiveRow naive_encode(const std::vector<float>& x, Format format) {
  NaiveRow row;
  const auto push16 = [&](uint16_t h) {
    row.bytes.push_back(uint8_t(h));
    row.bytes.push_back(uint8_t(h >> 8));
  };
  if (format == Format::kF32) {
    row.bytes.resize(x.size() * 4);
    std::memcpy(row.bytes.data(), x.data(), row.bytes.size());
    return row;
  }
  if (format == Format::kF16) {
    for (float v : x) push16(f32_to_f16(std::clamp(v, -65504.0f, 65504.0f)));
    return row;
  }
  if (format == Format::kBF16) {
    for (float v : x) push16(f32_to_bf16(std::clamp(v, -0x1.fep127f, 0x1.fep127f)));
    return row;
  }
  const int qmax = format == Format::kQ8 ? 127 : format == Format::kQ6 ? 31 : 7;
  float top = 0;
  for (float v : x) top = std::max(top, std::fabs(v));
  row.scale = std::max(top / float(qmax), 1e-6f);
  std::vector<int> codes;
  for (float v : x) codes.push_back(std::clamp(int(std::nearbyint(v / row.scale)), -qmax, qmax));
  if (format == Format::kQ8) {
    for (int c : codes) row.bytes.push_back(uint8_t(int8_t(c)));
    return row;
  }
  const int bits = format == Format::kQ6 ? 6 : 4, bias = format == Format::kQ6 ? 32 : 8;
  if (codes.size() * size_t(bits) % 8 != 0) codes.push_back(0);  // q4 of odd length
  row.bytes.assign(codes.size() * size_t(bits) / 8, 0);
  for (size_t i = 0; i < codes.size() * size_t(bits); ++i) {  // a little-endian stream, bit by bit
    const int bit = (codes[i / size_t(bits)] + bias) >> (i % size_t(bits)) & 1;
    row.bytes[i / 8] = uint8_t(row.bytes[i / 8] | bit << (i % 8));
  }
  return row;
}

inline std::vector<double> naive_decode(const uint8_t* bytes, float scale, int64_t head_dim, Format format) {
  std::vector<double> x;
  const auto bits_at = [&](int64_t first, int n) {
    int value = 0;
    for (int b = 0; b < n; ++b) value |= (bytes[(first + b) / 8] >> ((first + b) % 8) & 1) << b;
    return value;
  };
  for (int64_t i = 0; i < head_dim; ++i) {
    float f;
    const uint16_t h = uint16_t(bytes[format == Format::kF16 || format == Format::kBF16 ? 2 * i : 0] |
                                bytes[format == Format::kF16 || format == Format::kBF16 ? 2 * i + 1 : 0] << 8);
    switch (format) {
      case Format::kF32:
        std::memcpy(&f, bytes + 4 * i, 4);
        x.push_back(f);
        break;
      case Format::kF16:
        x.push_back(f16_to_f32(h));
        break;
      case Format::kBF16:
        x.push_back(bf16_to_f32(h));
        break;
      case Format::kQ8:
        x.push_back(double(int8_t(bytes[i])) * scale);
        break;
      case Format::kQ6:
        x.push_back(double(bits_at(6 * i, 6) - 32) * scale);
        break;
      case Format::kQ4:
        x.push_back(double(bits_at(4 * i, 4) - 8) * scale);
        break;
    }
  }
  return x;
}

}  // namespace pagedkv
