// Random weights and vectors, and the entries that run here.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "pagedkv/cache.h"
#include "pagedkv/products.h"
#include "tests/kernels/half.h"

namespace pagedkv {

// Where a block has its f16 scales, which must be numbers; every other byte may be anything.
inline std::vector<size_t> half_places(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ41:
    case WeightFormat::kQ51:
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K:
      return {0, 2};
    case WeightFormat::kQ3K:
      return {108};
    case WeightFormat::kQ6K:
      return {208};
    default:
      return {0};
  }
}

// The bytes of a weight, exactly as many as it has: a sanitizer sees a read past them.
struct RandomWeight {
  RandomWeight(WeightFormat format, int64_t n_out, int64_t n_in, uint32_t seed = 1)
      : format(format), n_out(n_out), n_in(n_in) {
    const int64_t n_blocks = n_out * n_in / weight_block_elements(format), size = weight_block_bytes(format);
    bytes.resize(size_t(n_blocks * size));
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> scale(-2, 2);
    for (std::byte& b : bytes) b = std::byte(random());
    for (int64_t i = 0; i < n_blocks; ++i)
      for (size_t at : half_places(format)) {
        const uint16_t half = f32_to_f16(scale(random));
        std::memcpy(bytes.data() + i * size + int64_t(at), &half, sizeof half);
      }
  }
  WeightMatrix matrix() const {
    return {.data = bytes.data(),
            .format = format,
            .n_out = n_out,
            .n_in = n_in,
            .row_bytes = weight_row_bytes(format, n_in)};
  }

  WeightFormat format;
  int64_t n_out, n_in;
  std::vector<std::byte> bytes;
};

inline std::vector<float> random_vectors(int64_t n, uint32_t seed = 2) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(random);
  return x;
}

inline std::vector<std::byte> quantized(const MatrixProducts& products, std::span<const float> x, int64_t n_in,
                                        int parts = 1) {
  const int64_t n_tokens = int64_t(x.size()) / n_in;
  std::vector<std::byte> to(size_t(MatrixProducts::quantized_bytes(n_in, n_tokens)));
  for (int i = 0; i < parts; ++i)
    EXPECT_TRUE(products.quantize(x.data(), n_in, n_in, n_tokens, to.data(), {i, parts}).ok());
  return to;
}

// [n_tokens, n_out], by so many parts, one after another.
inline std::vector<float> multiplied(const MatrixProducts& products, const WeightMatrix& w,
                                     std::span<const float> x, int parts = 1) {
  const int64_t n_tokens = int64_t(x.size()) / w.n_in;
  const std::vector<std::byte> q = quantized(products, x, w.n_in, parts);
  std::vector<float> y(size_t(n_tokens * w.n_out), -1);
  std::vector<std::byte> scratch(size_t(MatrixProducts::scratch_bytes()) + 64);
  void* aligned = scratch.data();
  size_t room = scratch.size();
  std::align(64, size_t(MatrixProducts::scratch_bytes()), aligned, room);
  for (int i = 0; i < parts; ++i) {
    const Status s = products.multiply({.weight = w,
                                        .x = q.data(),
                                        .n_tokens = n_tokens,
                                        .y = y.data(),
                                        .y_stride = w.n_out,
                                        .scratch = static_cast<std::byte*>(aligned)},
                                       {i, parts});
    EXPECT_TRUE(s.ok()) << s.message();
  }
  return y;
}

inline bool same_bits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// Every entry but the scalar one.
template <class F>
void for_each_fast_entry(F f) {
  for (const IsaEntry& isa : isa_entries()) {
    auto products = MatrixProducts::create(isa.name);
    if (!products.ok() || !products->fast()) continue;  // not on this machine, or none of ours
    SCOPED_TRACE(isa.name);
    f(*products);
  }
}

}  // namespace pagedkv
