#include <cmath>
#include <limits>
#include <memory>

#include "tests/products/world.h"

namespace pagedkv {
namespace {

// n_out beside and between whole panels, n_in of one run, of more, and with a rest.
struct Shape {
  int64_t n_out, n_in;
};
std::vector<Shape> shapes_of(WeightFormat format) {
  if (weight_block_elements(format) == 256) return {{32, 256}, {49, 512}, {100, 1280}};
  return {{32, 32}, {33, 96}, {49, 576}, {64, 800}, {100, 1568}};
}

template <class F>
void for_each_weight(F f) {
  for (WeightFormat format : weight_formats())
    for (const Shape& s : shapes_of(format)) {
      SCOPED_TRACE(std::string(weight_format_name(format)) + " " + std::to_string(s.n_out) + " x " +
                   std::to_string(s.n_in));
      const RandomWeight w(format, s.n_out, s.n_in);
      f(w.matrix());
    }
}

TEST(Products, EveryInstructionSetGivesTheBitsOfThePlainLoops) {
  const auto plain = MatrixProducts::create("scalar");
  ASSERT_TRUE(plain.ok());
  for_each_weight([&](const WeightMatrix& w) {
    for (int64_t n_tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 37}) {
      const std::vector<float> x = random_vectors(n_tokens * w.n_in);
      const std::vector<float> expected = multiplied(*plain, w, x);
      for_each_fast_entry([&](const MatrixProducts& products) {
        EXPECT_TRUE(same_bits(multiplied(products, w, x), expected)) << n_tokens << " tokens";
      });
    }
  });
}

TEST(Products, AVectorsResultDependsOnNoOtherVector) {
  for_each_fast_entry([&](const MatrixProducts& products) {
    for_each_weight([&](const WeightMatrix& w) {
      const std::vector<float> x = random_vectors(600 * w.n_in);
      const std::vector<float> all = multiplied(products, w, x);
      for (int64_t n : {1, 2, 7, 8, 9, 16, 31, 64, 517}) {
        const std::vector<float> some = multiplied(products, w, std::span(x).first(size_t(n * w.n_in)));
        EXPECT_TRUE(same_bits(some, std::span(all).first(some.size()))) << n << " of 600 tokens";
      }
    });
  });
}

TEST(Products, AnyNumberOfPartsGivesTheSameBits) {
  for_each_fast_entry([&](const MatrixProducts& products) {
    for_each_weight([&](const WeightMatrix& w) {
      for (int64_t n_tokens : {1, 8, 9, 200, 530}) {
        const std::vector<float> x = random_vectors(n_tokens * w.n_in);
        const std::vector<float> one = multiplied(products, w, x);
        for (int parts : {2, 3, 16, 64})
          EXPECT_TRUE(same_bits(multiplied(products, w, x, parts), one))
              << n_tokens << " tokens, " << parts << " parts";
      }
    });
  });
}

TEST(Products, RowsMayLieApart) {
  for_each_fast_entry([&](const MatrixProducts& products) {
    const RandomWeight packed(WeightFormat::kQ41, 40, 64);
    const WeightMatrix w = packed.matrix();
    std::vector<std::byte> spread(size_t(40 * 100));
    for (int64_t r = 0; r < 40; ++r)
      std::memcpy(spread.data() + r * 100, w.data + r * w.row_bytes, size_t(w.row_bytes));
    WeightMatrix apart = w;
    apart.data = spread.data();
    apart.row_bytes = 100;
    const std::vector<float> x = random_vectors(3 * 64);
    EXPECT_TRUE(same_bits(multiplied(products, apart, x), multiplied(products, w, x)));
  });
}

TEST(Products, ExtremeCodesDoNotSaturate) {
  const auto plain = MatrixProducts::create("scalar");
  for (WeightFormat format : weight_formats())
    for (int byte : {0x00, 0x7f, 0x80, 0xff}) {
      RandomWeight w(format, 32, 512);
      const uint16_t one = f32_to_f16(1);
      for (size_t i = 0; i < w.bytes.size(); ++i) w.bytes[i] = std::byte(byte);
      const int64_t size = weight_block_bytes(format);
      for (size_t i = 0; i < w.bytes.size(); i += size_t(size))
        for (size_t at : half_places(format)) std::memcpy(w.bytes.data() + i + at, &one, sizeof one);
      for (float sign : {1.0f, -1.0f}) {
        const std::vector<float> x(9 * 512, sign);
        const std::vector<float> expected = multiplied(*plain, w.matrix(), x);
        for_each_fast_entry([&](const MatrixProducts& products) {
          EXPECT_TRUE(same_bits(multiplied(products, w.matrix(), x), expected))
              << weight_format_name(format) << byte;
          EXPECT_TRUE(
              same_bits(multiplied(products, w.matrix(), std::span(x).first(512)), std::span(expected).first(32)));
        });
      }
    }
}

TEST(Products, WhatIsNoNumberComesOutAsNoNumber) {
  const RandomWeight w(WeightFormat::kQ80, 32, 96);
  for_each_fast_entry([&](const MatrixProducts& products) {
    for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                      -std::numeric_limits<float>::infinity()}) {
      std::vector<float> x = random_vectors(2 * 96);
      x[40] = bad;
      const std::vector<float> y = multiplied(products, w.matrix(), x);
      for (size_t i = 0; i < 32; ++i) EXPECT_TRUE(std::isnan(y[i]));
      for (size_t i = 32; i < 64; ++i) EXPECT_TRUE(std::isfinite(y[i]));  // the other vector's
    }
  });
}

TEST(Products, TinyValuesAreZeroAndHugeOnesStayFinite) {
  const auto plain = MatrixProducts::create("scalar");
  for (float v : {0.0f, 1e-45f, 1e-38f, 1e-30f, 1e-20f, 3e38f}) {
    const std::vector<float> x(64, v);
    const std::vector<std::byte> expected = quantized(*plain, x, 64);
    for_each_fast_entry([&](const MatrixProducts& products) {
      const std::vector<std::byte> got = quantized(products, x, 64);
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), 64), 0) << v;              // codes
      EXPECT_EQ(std::memcmp(got.data() + 128, expected.data() + 128, 40), 0) << v;  // scales, shifts, sums
    });
  }
}

TEST(Products, RefuseWhatTheyDoNotTake) {
  EXPECT_FALSE(MatrixProducts::takes(WeightFormat::kQ40, 31, 64));
  EXPECT_FALSE(MatrixProducts::takes(WeightFormat::kQ40, 32, 0));
  EXPECT_FALSE(MatrixProducts::takes(WeightFormat::kQ4K, 32, 128));
  EXPECT_TRUE(MatrixProducts::takes(WeightFormat::kQ4K, 32, 256));
  const auto products = MatrixProducts::create();
  ASSERT_TRUE(products.ok());
  const RandomWeight w(WeightFormat::kQ4K, 32, 256);
  WeightMatrix bad = w.matrix();
  bad.row_bytes -= 1;
  const Status s = products->multiply({.weight = bad}, {});
  EXPECT_EQ(s.code(), Code::kInvalidArgument);
  EXPECT_NE(s.message().find("32 x 256 in Q4_K with rows of 143 bytes"), std::string::npos) << s.message();
  EXPECT_EQ(products->quantize(nullptr, 0, 33, 1, nullptr, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(MatrixProducts::create("abacus").status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace pagedkv
