// Blocks that leave one cache through a tier and come back into another.
#include "tests/api/desk.h"
#include "tests/store/tier_world.h"

namespace pagedkv {
namespace {

std::vector<int32_t> tokens(int32_t n) {
  std::vector<int32_t> list;
  for (int32_t i = 0; i < n; ++i) list.push_back(i * 7 % 1000);
  return list;
}

TierBlock block_of(const KeyedBlock& keyed, const Cache& cache) {
  TierBlock block{.key = keyed.key,
                  .parent = keyed.parent,
                  .group = uint32_t(keyed.group),
                  .depth = keyed.depth,
                  .tokens = keyed.tokens};
  block.descriptor.bytes = cache.descriptor();
  return block;
}

// Puts all that got keys. Returns how many.
int64_t store(Cache& cache, Tier& tier) {
  const auto all = cache.take_keyed();
  for (const KeyedBlock& keyed : all) {
    std::vector<std::byte> image(size_t(cache.image_bytes(keyed.group).n));
    cache.read_image(keyed.group, keyed.block, image);
    TierPut put{.block = block_of(keyed, cache), .image = image};
    tier.put({&put, 1}, later());
    EXPECT_EQ(put.outcome, TierOutcome::kDone);
    EXPECT_TRUE(cache.let_go(keyed).ok());
    EXPECT_EQ(cache.let_go(keyed).code(), Code::kInvalidArgument);
  }
  return std::ssize(all);
}

// Brings back what the tier has of a prompt. Returns the leading tokens that are cached then.
Tokens bring_back(Cache& cache, Tier& tier, const std::vector<int32_t>& prompt) {
  const PrefixMatch match = cache.match(prompt);
  const int64_t n = tier.leading(match.keys, 0, later()), size = cache.options().block_size.n;
  auto restore = cache.begin_restore(prompt, match, Blocks(n));
  EXPECT_TRUE(restore.ok()) << restore.status().message();
  if (!restore.ok()) return {};
  std::vector<bool> filled;
  for (const Restore::Place& place : restore->places) {
    std::vector<std::byte> image(size_t(cache.image_bytes(place.group).n));
    const auto i = size_t(place.index);
    TierGet get{.block = {.key = match.keys[i],
                          .parent = i > 0 ? match.keys[i - 1] : cache.root(),
                          .group = uint32_t(place.group),
                          .depth = uint32_t(i),
                          .tokens = std::span(prompt).subspan(i * size_t(size), size_t(size))},
                .image = image};
    get.block.descriptor.bytes = cache.descriptor();
    tier.get({&get, 1}, later());
    filled.push_back(get.outcome == TierOutcome::kDone);
    if (filled.back()) cache.write_image(place.group, place.block, image);
  }
  return cache.end_restore(std::move(*restore), prompt, match, filled);
}

class ATierBetweenCaches : public testing::TestWithParam<std::pair<const char*, DeskOptions>> {};

TEST_P(ATierBetweenCaches, GivesTheSameBitsAsIfTheFirstHadNeverStopped) {
  DeskOptions options = GetParam().second;
  options.most_keyed = 1000;
  const Folder folder;
  const auto prompt = tokens(16 * 9 + 5), more = tokens(20);
  Desk first(options);
  {
    const auto tier = folder.open();
    first.start("a", prompt);
    first.append("a", std::vector<int32_t>(prompt.begin(), prompt.begin() + 60));
    first.append("a", std::vector<int32_t>(prompt.begin() + 60, prompt.end()));
    EXPECT_EQ(store(*first.cache, *tier), 9);
    EXPECT_TRUE(first.cache->take_keyed().empty());
  }
  const auto expected = first.append("a", more);
  const auto tier = folder.open();
  Desk second(options);
  EXPECT_EQ(bring_back(*second.cache, *tier, prompt), Tokens(16 * 9));
  EXPECT_TRUE(second.cache->verify().ok());
  EXPECT_EQ(second.start("a", prompt), 16 * 9);
  EXPECT_TRUE(second.cache->take_keyed().empty()) << "what came from a tier is not stored again";
  second.append("a", std::vector<int32_t>(prompt.end() - 5, prompt.end()));
  EXPECT_EQ(second.append("a", more), expected);
  if (options.window == 0) {
    EXPECT_EQ(first.cache->read_dense(first.ids["a"], 1)->k, second.cache->read_dense(second.ids["a"], 1)->k);
  }
}

DeskOptions with(KvQuantConfig formats, int64_t window = 0, ArenaOrder arena = ArenaOrder::kBlockMajor) {
  return {.formats = formats, .window = window, .arena = arena};
}
INSTANTIATE_TEST_SUITE_P(Tiers, ATierBetweenCaches,
                         testing::Values(std::pair("f16", with({Format::kF16, Format::kF16})),
                                         std::pair("f32", with({Format::kF32, Format::kF32})),
                                         std::pair("q8", with({Format::kQ8, Format::kQ8})),
                                         std::pair("q8_q4_layer_major",
                                                   with({Format::kQ8, Format::kQ4}, 0, ArenaOrder::kLayerMajor)),
                                         std::pair("q4_window", with({Format::kQ4, Format::kQ4}, 40))),
                         [](const auto& test) { return test.param.first; });

TEST(TiersOfACache, WhatATierHasOfAnotherCacheIsRefused) {
  const Folder folder;
  const auto tier = folder.open();
  DeskOptions options = with({Format::kQ8, Format::kQ8});
  options.most_keyed = 1000;
  const auto prompt = tokens(100);
  Desk first(options);
  first.start("a", prompt);
  first.append("a", prompt);
  EXPECT_EQ(store(*first.cache, *tier), 6);
  options.formats = {Format::kQ8, Format::kQ4};
  Desk second(options);
  EXPECT_EQ(bring_back(*second.cache, *tier, prompt), Tokens(0));  // other keys: not even found
}

TEST(TiersOfACache, BlocksPastTheLimitArePassedOverAndCounted) {
  DeskOptions options;
  options.most_keyed = 4;
  Desk desk(options);
  const auto prompt = tokens(160);
  desk.start("a", prompt);
  desk.append("a", prompt);
  EXPECT_EQ(desk.cache->stats().keyed_passed_over, 6);
  const auto keyed = desk.cache->take_keyed();
  EXPECT_EQ(keyed.size(), 4u);
  desk.close("a");
  EXPECT_EQ(desk.cache->stats().blocks_cached, 6);
  for (const KeyedBlock& block : keyed) EXPECT_TRUE(desk.cache->let_go(block).ok());
  EXPECT_EQ(desk.cache->stats().blocks_cached, 10);
}

TEST(TiersOfACache, ARestoreWithoutRoomChangesNothing) {
  DeskOptions options;
  options.num_blocks = 4;
  options.dynamic = false;
  Desk desk(options);
  const auto prompt = tokens(160);
  const auto match = desk.cache->match(prompt);
  EXPECT_EQ(desk.cache->begin_restore(prompt, match, Blocks(9)).status().code(), Code::kCapacity);
  EXPECT_EQ(desk.cache->begin_restore(prompt, match, Blocks(11)).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(desk.cache->begin_restore(prompt, match, Blocks(-1)).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(desk.cache->verify().ok());
  EXPECT_EQ(desk.cache->stats().blocks_free, 4);
}

}  // namespace
}  // namespace pagedkv
