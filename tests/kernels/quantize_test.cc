// The bytes of every format, element by element, against FORMATS section 1 written out plainly.
#include "tests/kernels/paged_world.h"

namespace pagedkv {
namespace {

std::vector<std::vector<float>> rows_to_encode(int64_t d) {
  std::vector<std::vector<float>> rows;
  std::mt19937_64 random{uint64_t(d)};
  std::normal_distribution<float> gauss;
  const auto row = [&](auto value) {
    rows.emplace_back();
    for (int64_t i = 0; i < d; ++i) rows.back().push_back(value(i));
  };
  for (float scale : {1.0f, 1e-3f, 1e-5f, 1e-7f, 300.0f, 1e6f, 1e30f})
    row([&](int64_t) { return scale * gauss(random); });
  row([](int64_t) { return 0.0f; });
  row([](int64_t) { return -0.0f; });
  row([](int64_t i) { return i % 2 ? 1.0f : -1.0f; });
  row([](int64_t i) { return float(i % 15) - 7; });         // ties of q8, exact codes of q4
  row([](int64_t i) { return (float(i % 31) - 15) / 2; });  // halves: ties to even
  row([](int64_t i) { return i == 0 ? 7.0f : float(i % 14) - 6.5f; });
  row([](int64_t i) { return i == 0 ? 127.0f : float(i % 254) - 126.5f; });
  row([](int64_t i) { return i == 0 ? 31.0f : float(i % 62) - 30.5f; });
  row([](int64_t i) { return 1e-45f * float(i % 3); });  // subnormals
  row([](int64_t i) { return i % 2 ? 5.7e-35f : -1e-38f; });
  row([d](int64_t i) { return i == d - 1 ? 1e7f : 1.0f; });
  row([](int64_t i) { return i % 3 ? 65504.0f : 65536.0f; });
  row([](int64_t i) { return i % 3 ? -65519.0f : 65520.0f; });
  row([](int64_t i) { return i % 2 ? 3.4028235e38f : -3.39e38f; });
  row([](int64_t i) { return (i % 2 ? 1.0f : -1.0f) * std::ldexp(1.0f + float(i % 7) / 4096, -int(i % 30)); });
  return rows;
}

TEST(Quantize, EveryByteAndScaleIsTheDefinitionsOnEveryEntry) {  // O-NUM-09 among the head dims
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (int64_t d : {1, 2, 3, 4, 7, 8, 12, 20, 33, 64, 80, 96, 100, 128, 192, 255, 256, 512, 1024}) {
      if (!check_head_dim(format, d).ok()) continue;
      SCOPED_TRACE(d);
      const auto rows = rows_to_encode(d);
      std::vector<float> flat;
      for (const auto& row : rows) flat.insert(flat.end(), row.begin(), row.end());
      const size_t width = size_t(row_bytes(format, d).n);
      std::vector<std::byte> bytes(rows.size() * width);
      std::vector<float> scales(rows.size(), -1);
      ASSERT_EQ(entry.quantize(flat.data(), int64_t(rows.size()), d, format, bytes.data(), scales.data()), -1);
      std::vector<float> decoded(flat.size());
      entry.dequantize(bytes.data(), scales.data(), int64_t(rows.size()), d, format, decoded.data());
      for (size_t r = 0; r < rows.size(); ++r) {
        const NaiveRow want = naive_encode(rows[r], format);
        ASSERT_EQ(want.bytes.size(), width);
        ASSERT_EQ(std::memcmp(bytes.data() + r * width, want.bytes.data(), width), 0) << "row " << r;
        if (is_quantized(format)) {
          ASSERT_EQ(scales[r], want.scale) << "row " << r;
        }
        const auto values = naive_decode(want.bytes.data(), want.scale, d, format);
        for (int64_t i = 0; i < d; ++i) {
          const float got = decoded[r * size_t(d) + size_t(i)];
          ASSERT_EQ(got, float(values[size_t(i)])) << "row " << r << " element " << i;
          // A scale that is rounded up takes the largest floats of all past the range: code * scale is infinite.
          ASSERT_TRUE(std::isfinite(got) || std::fabs(rows[r][size_t(i)]) > 3.38e38f);
        }
      }
    }
  });
}

TEST(Quantize, TheErrorIsAtMostHalfAStep) {
  for (Format format : {Format::kQ8, Format::kQ6, Format::kQ4}) {
    const int steps = format == Format::kQ8 ? 254 : format == Format::kQ6 ? 62 : 14;
    std::mt19937_64 random(3);
    std::normal_distribution<float> gauss;
    std::vector<float> x(128 * 50);
    for (float& v : x) v = gauss(random);
    const auto rows = quantize_symmetric(x, 128, format);
    ASSERT_TRUE(rows.ok());
    const auto back = dequantize_symmetric(*rows, 128, format);
    ASSERT_TRUE(back.ok());
    for (size_t r = 0; r < 50; ++r) {
      float top = 0;
      for (size_t i = 0; i < 128; ++i) top = std::max(top, std::fabs(x[r * 128 + i]));
      for (size_t i = 0; i < 128; ++i) {
        EXPECT_LE(std::fabs((*back)[r * 128 + i] - x[r * 128 + i]), top / float(steps) * 1.0001f);
      }
    }
  }
}

TEST(Quantize, ANanOrInfinityNamesItsRow) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (float bad : {kNan, kInfinity, -kInfinity}) {
      for (int64_t at : {0, 3, 15, 16, 19}) {
        std::vector<float> x(3 * 20, 1.0f);
        x[size_t(20 + at)] = bad;
        std::vector<std::byte> bytes(3 * 80);
        std::vector<float> scales(3);
        EXPECT_EQ(entry.quantize(x.data(), 3, 20, format, bytes.data(), scales.data()), 1);
      }
    }
  });
}

TEST(Quantize, ThePublicFunctionsRefuseWhatTheyCannotDo) {
  const std::vector<float> x(24, 1.0f);
  EXPECT_EQ(quantize_symmetric(x, 8, Format::kF16).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(quantize_symmetric(x, 7, Format::kQ8).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(quantize_symmetric(x, 6, Format::kQ6).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(quantize_symmetric(x, 0, Format::kQ8).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(quantize_symmetric(x, 4096, Format::kQ8).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(quantize_symmetric({}, 8, Format::kQ8).ok());
  std::vector<float> bad = x;
  bad[17] = kNan;
  const Status status = quantize_symmetric(bad, 8, Format::kQ4).status();
  EXPECT_EQ(status.code(), Code::kNotFinite);
  EXPECT_NE(status.message().find("row 2"), std::string::npos) << status.message();
  QuantizedRows rows = *quantize_symmetric(x, 8, Format::kQ8);
  rows.codes.pop_back();
  EXPECT_EQ(dequantize_symmetric(rows, 8, Format::kQ8).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace pagedkv
