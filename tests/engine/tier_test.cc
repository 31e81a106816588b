// Blocks that outlive the engine that computed them: what comes back, what does not, and that nobody waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "engine/tier_traffic.h"
#include "tests/engine/files.h"
#include "tests/engine/world.h"
#include "tests/store/tier_world.h"

namespace pagedkv::engine {
namespace {

EngineOptions options_on(const std::string& folder, KvQuantConfig formats = {},
                         const std::string& model = tiny_model("d64_gqa3_tied")) {
  TierUse use{.min_prefix = Tokens(32), .patience = std::chrono::hours(1)};
  if (Status s = use_folder({.directory = folder, .budget = Bytes(64 << 20)}, use); !s.ok())
    throw std::runtime_error(s.message());
  return {.model_path = model,
          .context = Tokens(512),
          .threads = 1,
          .kv_formats = formats,
          .num_blocks = Blocks(64),
          .kv_memory = Bytes(64 << 20),
          .chunk = Tokens(64),
          .reproducible = true,
          .tier = std::move(use)};
}

GenerateRequest greedy(std::vector<int32_t> prompt, int max_tokens = 8) {
  GenerateRequest request{.prompt = std::move(prompt), .max_tokens = Tokens(max_tokens)};
  request.sampling.temperature = 0;
  return request;
}

GenerateResult answer(World& world, const std::vector<int32_t>& prompt) {
  auto result = world.engine->generate(greedy(prompt));
  if (!result.ok()) throw std::runtime_error(result.status().message());
  return *result;
}

void wait_until_open(World& world) {
  while (!world.engine->tier()->figures().open) std::this_thread::yield();
}

void expect_nothing_held(World& world) {
  world.engine->tier()->collect();
  EXPECT_EQ(world.engine->cache().stats().blocks_open, 0);
  EXPECT_TRUE(world.engine->cache().verify().ok());
}

TEST(EngineTier, APromptIsThereAfterARestart) {
  for (const char* formats : {"off", "f32", "q8", "q4", "q8:q6"}) {
    SCOPED_TRACE(formats);
    const Folder folder;
    const auto config = *parse_kv_quant(formats);
    std::vector<int32_t> prompt, tokens;
    {
      World world(options_on(folder.path(), config));
      prompt = random_tokens(200, world.vocab_size(), 1);
      tokens = answer(world, prompt).tokens;
    }
    World world(options_on(folder.path(), config));
    const GenerateResult again = answer(world, prompt);
    EXPECT_EQ(again.tokens_reused, 192);  // whole blocks, and never the last token
    EXPECT_EQ(again.tokens, tokens);
    const TierFigures figures = world.engine->tier()->figures();
    EXPECT_EQ(figures.restores, 1);
    EXPECT_EQ(figures.restored_tokens, 192);
    expect_nothing_held(world);
  }
}

TEST(EngineTier, ARestoredPromptGivesTheLogitsOfOneThatWasComputed) {
  for (const char* model : {"d64_gqa3_tied", "gemma3_window8", "gemma3_window40_all"}) {
    SCOPED_TRACE(model);
    const Folder folder;
    std::vector<int32_t> prompt;
    {
      World world(options_on(folder.path(), {}, tiny_model(model)));
      prompt = random_tokens(150, world.vocab_size(), 2);
      answer(world, prompt);
    }
    World world(options_on(folder.path(), {}, tiny_model(model)));
    EXPECT_GT(answer(world, prompt).tokens_reused, 0);
    // Other tokens from the end of what came back on.
    for (size_t i = 144; i < prompt.size(); ++i) prompt[i] = prompt[i] == 3 ? 4 : 3;
    const auto whole = world.logits(prompt, {64});
    const Started started = world.start(prompt);
    EXPECT_EQ(started.reused.n, 144);
    const auto rest = world.feed(started.id, std::span(prompt).subspan(size_t(started.reused.n)), {64});
    const auto expected = std::span(whole).last(rest.size());
    EXPECT_TRUE(std::equal(rest.begin(), rest.end(), expected.begin(), expected.end()));
    EXPECT_TRUE(world.engine->cache().release(started.id).ok());
    expect_nothing_held(world);
  }
}

TEST(EngineTier, AnotherModelFormatOrNamespaceFindsNothing) {
  const Folder folder;
  std::vector<int32_t> prompt;
  {
    World world(options_on(folder.path()));
    prompt = random_tokens(200, world.vocab_size(), 3);
    answer(world, prompt);
  }
  {
    World world(options_on(folder.path(), *parse_kv_quant("q8")));
    EXPECT_EQ(answer(world, prompt).tokens_reused, 0);
  }
  // A byte of the weights that no fingerprint samples.
  Contents contents = read_file(tiny_model("d64_gqa3_tied"));
  contents[contents.size() - 3] ^= std::byte(1);
  const TemporaryFile changed(contents);
  World world(options_on(folder.path(), {}, changed.path()));
  wait_until_open(world);
  EXPECT_EQ(answer(world, prompt).tokens_reused, 0);
  EXPECT_EQ(world.engine->tier()->figures().restores, 0);
}

// Does as it is told to.
class FaultyTier final : public Tier {
 public:
  enum class Fault { kLate, kDown, kRefuses };
  explicit FaultyTier(Fault fault) : fault_(fault) {}
  TierTraits traits() const override { return {.name = "faulty", .medium = "DISK", .max_image = Bytes(1 << 30)}; }
  int64_t leading(std::span<const PrefixKey> keys, uint32_t, Deadline) override {
    if (fault_ == Fault::kLate) answers.wait(false);
    return fault_ == Fault::kDown ? 0 : std::ssize(keys);  // which is not true
  }
  void get(std::span<TierGet> items, Deadline) override {
    for (TierGet& item : items) std::fill(item.image.begin(), item.image.end(), std::byte(0x7b));
    items[0].outcome = TierOutcome::kRefused;
  }
  void put(std::span<TierPut> items, Deadline) override {
    for (TierPut& item : items) item.outcome = TierOutcome::kDown;
  }
  void touch(const PrefixKey&) override {}
  bool remove(std::span<const PrefixKey>, Deadline) override { return false; }
  void tick() override {}
  TierStats stats() const override { return {.down = true}; }
  std::atomic<bool> answers{false};  // late ones

 private:
  const Fault fault_;
};

TEST(EngineTier, ATierThatFailsCostsNoAnswerAndNoBlock) {
  const Folder folder;
  EngineOptions plain = options_on(folder.path());
  plain.tier = {};
  World alone(plain);
  const auto prompt = random_tokens(200, alone.vocab_size(), 4);
  const auto tokens = answer(alone, prompt).tokens;
  using enum FaultyTier::Fault;
  for (const auto fault : {kLate, kDown, kRefuses}) {
    EngineOptions options = plain;
    const auto tier = std::make_shared<FaultyTier>(fault);
    options.tier = {.tier = tier,
                    .min_prefix = Tokens(32),
                    .patience = fault == kLate ? std::chrono::milliseconds(50) : std::chrono::hours(1),
                    .memo = folder.path() + "/m"};
    World world(options);
    wait_until_open(world);
    const GenerateResult result = answer(world, prompt);
    EXPECT_EQ(result.tokens, tokens);
    EXPECT_EQ(result.tokens_reused, 0);
    tier->answers = true;
    tier->answers.notify_all();
    const TierFigures figures = world.engine->tier()->figures();
    EXPECT_EQ(figures.not_late, fault == kLate);
    EXPECT_EQ(figures.restores, fault == kRefuses);
    EXPECT_EQ(figures.restored_tokens, 0);
    expect_nothing_held(world);
  }
}

TEST(EngineTier, WhatWaitsToBeWrittenGivesWayToAFullPool) {
  class Slow final : public Tier {
   public:
    TierTraits traits() const override { return {.name = "slow", .medium = "DISK", .max_image = Bytes(1 << 30)}; }
    int64_t leading(std::span<const PrefixKey>, uint32_t, Deadline) override { return 0; }
    void get(std::span<TierGet>, Deadline) override {}
    void put(std::span<TierPut>, Deadline) override { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }
    void touch(const PrefixKey&) override {}
    bool remove(std::span<const PrefixKey>, Deadline) override { return false; }
    void tick() override {}
    TierStats stats() const override { return {}; }
  };
  const Folder folder;
  EngineOptions options = options_on(folder.path());
  options.tier.tier = std::make_shared<Slow>();
  options.num_blocks = Blocks(32);  // just the context
  options.dynamic = false;
  World world(options);
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    const auto result = world.engine->generate(greedy(random_tokens(490, world.vocab_size(), seed)));
    ASSERT_TRUE(result.ok()) << result.status().message();
  }
  EXPECT_GT(world.engine->tier()->figures().skipped_gave_way, 0);
}

}  // namespace
}  // namespace pagedkv::engine
