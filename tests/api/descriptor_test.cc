// The record that keys, files and stores of blocks rest on: its bytes are promised.
#include "api/descriptor.h"

#include <gtest/gtest.h>

#include <vector>

namespace pagedkv {
namespace {

CacheOptions two_groups() {
  return {.groups = {{.shape = {2, 64, 32, {Format::kQ8, Format::kQ4}}, .layers = {0, 300}},
                     {.shape = {1, 64, 64, {}}, .sliding_window = 40, .layers = {1}}},
          .fingerprint = "m"};
}

std::string number(int64_t value) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = char(uint64_t(value) >> (8 * i));
  return bytes;
}

std::string text(std::string_view value) { return number(int64_t(value.size())) + std::string(value); }

TEST(Descriptor, IsTheDocumentedRecord) {
  const std::vector<ProductPaths> paths = {{.k_codes = true, .v_codes = false}, {}};
  EXPECT_EQ(describe(two_groups(), paths),
            text("pagedkv") + number(1) + text("m") + number(16) + text("block_major") + number(2) +
                // the first group
                text("q8:q4") + number(2) + number(64) + number(32) + number(0) + number(kMaxTokens) + number(0) +
                text("none") + number(1) + number(0) + number(2) + number(0) + number(300) +
                // the second
                text("f16") + number(1) + number(64) + number(64) + number(0) + number(kMaxTokens) + number(40) +
                text("none") + number(0) + number(0) + number(1) + number(1));
}

TEST(Descriptor, DiffersWithAllThatMakesABlockAnother) {
  const std::vector<ProductPaths> paths(2), by_codes = {{.k_codes = true}, {}};
  const Key own = descriptor_of(two_groups(), paths);
  EXPECT_EQ(own, descriptor_of(two_groups(), paths));
  EXPECT_NE(own, descriptor_of(two_groups(), by_codes));
  const auto changed = [&](auto change) {
    CacheOptions options = two_groups();
    change(options);
    return descriptor_of(options, paths);
  };
  EXPECT_NE(own, changed([](CacheOptions& o) { o.fingerprint = "m2"; }));
  EXPECT_NE(own, changed([](CacheOptions& o) { o.block_size = Tokens(32); }));
  EXPECT_NE(own, changed([](CacheOptions& o) { o.arena = ArenaOrder::kLayerMajor; }));
  EXPECT_NE(own, changed([](CacheOptions& o) { o.groups[1].sliding_window = 41; }));
  EXPECT_NE(own, changed([](CacheOptions& o) { o.groups[0].shape.formats.v = Format::kQ8; }));
  EXPECT_NE(own, changed([](CacheOptions& o) { o.groups[0].layers = {0, 301}; }));
  EXPECT_NE(own, changed([](CacheOptions& o) { std::swap(o.groups[0], o.groups[1]); }));
  // What does not change a block: how many there are.
  EXPECT_EQ(own, changed([](CacheOptions& o) { o.num_blocks = Blocks(7); }));
}

}  // namespace
}  // namespace pagedkv
