// Names, sizes and spellings of the formats.
#include "pagedkv/format.h"

#include <gtest/gtest.h>

namespace pagedkv {
namespace {

TEST(Format, EverySpellingNamesItsMode) {
  const std::pair<Format, std::vector<const char*>> modes[] = {
      {Format::kF16, {"", " ", "none", "false", "0", "off", "OFF", "disable", "Disabled", "f16", "F16", "auto"}},
      {Format::kBF16, {"bf16", "BF16"}},
      {Format::kF32, {"f32"}},
      {Format::kQ8, {"q8", "8", "8bit", "int8", "uint8", "q8_0", "Q8-0"}},
      {Format::kQ6, {"q6", "6", "6bit", "int6", "uint6"}},
      {Format::kQ4, {"q4", "4", "4bit", "INT4", "uint4", "q4_0", "q4-0"}},
  };
  for (const auto& [format, words] : modes) {
    for (const char* word : words) {
      const Result<Format> parsed = parse_format(word);
      ASSERT_TRUE(parsed.ok()) << word;
      EXPECT_EQ(*parsed, format) << word;
    }
    EXPECT_EQ(*parse_format(format_name(format)), format);
  }
}

TEST(Format, AnUnknownModeListsTheModes) {
  for (const char* word : {"fp8", "q5", "16", "on", "true", "q8_1", "q8 q4"}) {
    const Status status = parse_format(word).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << word;
    EXPECT_NE(status.message().find(word), std::string::npos);
    for (const char* mode : {"off", "f32", "bf16", "q8", "q6", "q4", "auto"}) {
      EXPECT_NE(status.message().find(mode), std::string::npos) << status.message();
    }
  }
}

TEST(Format, KeysAndValuesMayBeNamedApart) {
  EXPECT_EQ(*parse_kv_quant("q8"), (KvQuantConfig{.k = Format::kQ8, .v = Format::kQ8}));
  EXPECT_EQ(*parse_kv_quant("Q8:4bit"), (KvQuantConfig{.k = Format::kQ8, .v = Format::kQ4}));
  EXPECT_EQ(*parse_kv_quant("off:q4"), (KvQuantConfig{.k = Format::kF16, .v = Format::kQ4}));
  for (const char* bad : {":", "q8:", ":q4", "q8:q4:q6", "q8:fp8"}) {
    EXPECT_EQ(parse_kv_quant(bad).status().code(), Code::kInvalidArgument) << bad;
  }
  EXPECT_EQ(kv_quant_name({.k = Format::kQ8, .v = Format::kQ4}), "q8:q4");
  EXPECT_EQ(kv_quant_name({.k = Format::kQ6, .v = Format::kQ6}), "q6");
}

TEST(Format, SpellingsOfOtherLayoutsAreKnown) {
  for (const char* word : {"q8_0", "Q4-0", "q8:q4_0", "q8_0:q4"}) EXPECT_TRUE(is_foreign_spelling(word)) << word;
  for (const char* word : {"q8", "", "q8:q4", "off"}) EXPECT_FALSE(is_foreign_spelling(word)) << word;
}

TEST(Format, BytesPerTokenAreThoseOfTheTable) {  // FORMATS section 1, d=128: K and V of one KV head
  const auto bytes = [](Format format) {
    return bytes_per_token({.num_kv_heads = 1, .head_dim_k = 128, .head_dim_v = 128, .formats = {format, format}})
        .n;
  };
  EXPECT_EQ(bytes(Format::kF32), 1024);
  EXPECT_EQ(bytes(Format::kF16), 512);
  EXPECT_EQ(bytes(Format::kBF16), 512);
  EXPECT_EQ(bytes(Format::kQ8), 264);
  EXPECT_EQ(bytes(Format::kQ6), 200);
  EXPECT_EQ(bytes(Format::kQ4), 136);
  const LayerShape mixed{
      .num_kv_heads = 3, .head_dim_k = 192, .head_dim_v = 33, .formats = {Format::kQ8, Format::kQ4}};
  EXPECT_EQ(bytes_per_token(mixed).n, 3 * (192 + 4 + 17 + 4));
}

TEST(Format, AHeadDimThatAFormatCannotHoldIsRefusedByName) {
  EXPECT_TRUE(check_head_dim(Format::kQ4, 7).ok());
  EXPECT_TRUE(check_head_dim(Format::kQ6, 80).ok());
  EXPECT_EQ(check_head_dim(Format::kF16, 0).code(), Code::kInvalidArgument);
  const Status status = check_head_dim(Format::kQ6, 70);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_NE(status.message().find("70"), std::string::npos);
}

}  // namespace
}  // namespace pagedkv
