// The article's object: one layer, one sequence.

#include "pagedkv/paged_kv_cache.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace pagedkv {
namespace {

struct Rows {
  std::vector<float> values;
  HeadMajorRows view;
};
Rows random_rows(int64_t heads, int64_t n, int64_t dim, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Rows rows{std::vector<float>(size_t(heads * n * dim)), {}};
  for (float& x : rows.values) x = normal(random);
  rows.view = {rows.values.data(), heads, n, dim};
  return rows;
}

TEST(PagedKVCache, CapacityIsAsAskedBeforeTheFirstWrite) {
  auto cache = PagedKVCache::create({.block_size = 16, .num_blocks = 1024});
  ASSERT_TRUE(cache.ok());
  EXPECT_EQ(cache->capacity(), 16384);
  EXPECT_EQ(cache->offset(), 0);
  EXPECT_EQ(cache->trim(3), 0);
  EXPECT_FALSE(PagedKVCache::create({.block_size = 0}).ok());
  EXPECT_FALSE(PagedKVCache::create({.num_blocks = -1}).ok());
}

TEST(PagedKVCache, FetchReturnsWhatWasWrittenAndCountsTheDenseForm) {
  auto cache = PagedKVCache::create({.kv_quant_config = {Format::kF32, Format::kF32}});
  const Rows k = random_rows(2, 5, 8, 1), v = random_rows(2, 5, 6, 2);
  auto dense = cache->update_and_fetch(k.view, v.view);
  ASSERT_TRUE(dense.ok()) << dense.status().message();
  EXPECT_EQ(dense->keys, k.values);
  EXPECT_EQ(dense->values, v.values);
  EXPECT_EQ(cache->offset(), 5);
  EXPECT_EQ(cache->stats().dense_materializations, 1);
}

TEST(PagedKVCache, FromCacheTakesTheFirstOffsetTokens) {
  const Rows k = random_rows(2, 32, 8, 1), v = random_rows(2, 32, 8, 2);
  auto cache = PagedKVCache::from_cache(k.view, v.view, 20, {.kv_quant_config = {Format::kQ4, Format::kQ4}});
  ASSERT_TRUE(cache.ok()) << cache.status().message();
  EXPECT_EQ(cache->offset(), 20);
  const Rows more = random_rows(2, 1, 8, 3);
  auto dense = cache->update_and_fetch(more.view, more.view);
  ASSERT_TRUE(dense.ok());
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t t = 0; t < 20; ++t) {
      float most = 0;
      for (int64_t i = 0; i < 8; ++i) most = std::max(most, std::abs(k.values[size_t((h * 32 + t) * 8 + i)]));
      for (int64_t i = 0; i < 8; ++i)
        EXPECT_NEAR(dense->keys[size_t((h * 21 + t) * 8 + i)], k.values[size_t((h * 32 + t) * 8 + i)],
                    most / 13.9f);
    }
  EXPECT_FALSE(PagedKVCache::from_cache(k.view, v.view, 33).ok());
}

TEST(PagedKVCache, AttentionReadsPackedBlocksAndMatchesADenseSum) {
  auto cache = PagedKVCache::create({.block_size = 4, .kv_quant_config = {Format::kF32, Format::kF32}});
  const Rows k = random_rows(2, 11, 8, 1), v = random_rows(2, 11, 8, 2), q = random_rows(4, 3, 8, 3);
  ASSERT_TRUE(cache->update_without_fetch(k.view, v.view).ok());
  for (const int64_t window : {0, 4}) {
    auto out = cache->paged_attention(q.view, {.sliding_window = window});
    ASSERT_TRUE(out.ok()) << out.status().message();
    for (int64_t h = 0; h < 4; ++h)
      for (int64_t t = 0; t < 3; ++t) {
        const int64_t position = 8 + t, from = window == 0 ? 0 : position - window + 1;
        std::vector<double> expected(8);
        double sum = 0;
        for (int64_t key = from; key <= position; ++key) {
          double s = 0;
          for (int64_t i = 0; i < 8; ++i)
            s += double(q.values[size_t((h * 3 + t) * 8 + i)]) * k.values[size_t((h / 2 * 11 + key) * 8 + i)];
          const double p = std::exp(s / std::sqrt(8.0));
          sum += p;
          for (int64_t i = 0; i < 8; ++i) expected[size_t(i)] += p * v.values[size_t((h / 2 * 11 + key) * 8 + i)];
        }
        for (int64_t i = 0; i < 8; ++i)
          EXPECT_NEAR((*out)[size_t((h * 3 + t) * 8 + i)], expected[size_t(i)] / sum, 1e-5);
      }
  }
  EXPECT_EQ(cache->stats().dense_materializations, 0);
}

TEST(PagedKVCache, TrimRemovesTheLastTokensAndSaysHowMany) {
  auto cache = PagedKVCache::create();
  const Rows k = random_rows(1, 10, 8, 1);
  ASSERT_TRUE(cache->update_without_fetch(k.view, k.view).ok());
  EXPECT_EQ(cache->trim(4), 4);
  EXPECT_EQ(cache->trim(0), 0);
  EXPECT_EQ(cache->trim(-3), 0);
  EXPECT_EQ(cache->trim(100), 6);
  EXPECT_EQ(cache->offset(), 0);
}

TEST(PagedKVCache, GrowsWhenDynamicAndRefusesWithNeedAndHaveWhenNot) {
  const Rows k = random_rows(1, 40, 8, 1);
  auto fixed = PagedKVCache::create({.block_size = 4, .num_blocks = 8, .dynamic = false});
  const Status refused = fixed->update_without_fetch(k.view, k.view);
  EXPECT_EQ(refused.code(), Code::kCapacity);
  EXPECT_NE(refused.message().find("need 40 tokens (10 blocks), have 32 tokens (8 blocks)"), std::string::npos)
      << refused.message();
  EXPECT_EQ(fixed->offset(), 0);
  EXPECT_EQ(fixed->grow_to_capacity(100).code(), Code::kCapacity);

  auto growing = PagedKVCache::create({.block_size = 4, .num_blocks = 8});
  ASSERT_TRUE(growing->update_without_fetch(k.view, k.view).ok());
  ASSERT_TRUE(growing->grow_to_capacity(20000).ok());
  EXPECT_GE(growing->capacity(), 20000);
  EXPECT_EQ(growing->stats().growth_bytes_copied, 0);
  EXPECT_EQ(growing->grow_to_capacity(int64_t{1} << 50).code(), Code::kCapacity);
  EXPECT_EQ(growing->grow_to_capacity(-1).code(), Code::kInvalidArgument);
}

TEST(PagedKVCache, ShapesThatDoNotFitAreNamed) {
  auto cache = PagedKVCache::create();
  const Rows k = random_rows(2, 3, 8, 1), other = random_rows(2, 3, 16, 1);
  ASSERT_TRUE(cache->update_without_fetch(k.view, k.view).ok());
  EXPECT_EQ(cache->update_without_fetch(other.view, other.view).code(), Code::kInvalidArgument);
  EXPECT_EQ(cache->update_without_fetch({}, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(cache->paged_attention(random_rows(3, 1, 8, 1).view).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(cache->paged_attention(random_rows(2, 4, 8, 1).view).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(cache->offset(), 3);
}

}  // namespace
}  // namespace pagedkv
