// The scheduler with a tier, on a model whose answers depend on what is really in the blocks.
#include "engine/tier_traffic.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/server/scheduler_world.h"
#include "tests/store/tier_world.h"

namespace pagedkv::engine {
namespace {

// Prompts of which some begin alike.
std::vector<std::string> prompts_of(int n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::string> prompts;
  for (int i = 0; i < n; ++i) {
    std::string text = "system " + std::to_string(random() % 4) + std::string(40 + random() % 60, 'x');
    for (const size_t length = 30 + random() % 250; text.size() < length;) text += char('a' + random() % 26);
    prompts.push_back(text);
  }
  return prompts;
}

void expect_right_answers(World& world, const std::vector<std::string>& prompts) {
  std::vector<std::shared_ptr<Collector>> sinks;
  for (const std::string& prompt : prompts) sinks.push_back(world.ask(prompt, 12));
  for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(sinks[i]->text(), expected(prompts[i], 12));
}

// The pool is too small for all of them: sequences give way, and so does what waits to be written.
TEST(SchedulerWithATier, ManyAtOnceAndAgainAfterARestart) {
  const Folder folder;
  const auto prompts = prompts_of(40, 1);
  int64_t restored = 0;
  for (int round = 0; round < 3; ++round) {
    World world({.num_blocks = 60, .tier = folder.open()},
                {.max_num_seqs = 8, .max_num_batched_tokens = Tokens(64)});
    expect_right_answers(world, prompts);
    world.idle();
    restored += world.model->tier()->figures().restored_tokens;
    world.model->tier()->collect();
  }
  EXPECT_GT(restored, 0);
}

// A disk tier whose reads wait until they may go on.
class HeldTier final : public Tier {
 public:
  explicit HeldTier(std::unique_ptr<Tier> tier) : tier_(std::move(tier)) {}
  TierTraits traits() const override { return tier_->traits(); }
  int64_t leading(std::span<const PrefixKey> keys, uint32_t group, Deadline deadline) override {
    return tier_->leading(keys, group, deadline);
  }
  void get(std::span<TierGet> items, Deadline deadline) override {
    ++reads;
    reads.notify_all();
    held.wait(true);
    tier_->get(items, deadline);
  }
  void put(std::span<TierPut> items, Deadline deadline) override { tier_->put(items, deadline); }
  void touch(const PrefixKey& last) override { tier_->touch(last); }
  bool remove(std::span<const PrefixKey> keys, Deadline deadline) override { return tier_->remove(keys, deadline); }
  void tick() override { tier_->tick(); }
  TierStats stats() const override { return tier_->stats(); }

  std::atomic<bool> held{true};
  std::atomic<int> reads{0};
  void release() {
    held = false;
    held.notify_all();
  }

 private:
  std::unique_ptr<Tier> tier_;
};

// A world has stored the prompt's blocks there and ended.
std::shared_ptr<HeldTier> held_tier_with(const std::string& prompt, const Folder& folder) {
  {
    World world({.tier = folder.open()});
    expect_right_answers(world, {prompt});
  }
  return std::make_shared<HeldTier>(folder.open());
}

TEST(SchedulerWithATier, WhoeverWaitsForADiskWaitsAlone) {
  const Folder folder;
  const std::string prompt(200, 'p');
  const auto tier = held_tier_with(prompt, folder);
  World world({.tier = tier});
  const auto waits = world.ask(prompt, 12);
  tier->reads.wait(0);
  const auto like_it = world.ask(prompt + " and more", 12);  // waits for the same blocks
  expect_right_answers(world, {"another", std::string(150, 'q')});
  EXPECT_FALSE(waits->ended());
  EXPECT_FALSE(like_it->ended());
  EXPECT_EQ(world.scheduler->stats().restoring, 1);
  tier->release();
  EXPECT_EQ(waits->text(), expected(prompt, 12));
  EXPECT_EQ(like_it->text(), expected(prompt + " and more", 12));
  EXPECT_GE(waits->usage().cached_tokens, 192);
  EXPECT_GE(like_it->usage().cached_tokens, 192);
  world.expect_no_block_is_held();
}

TEST(SchedulerWithATier, ACancelWhileABeginningIsReadGivesItsBlocksBack) {
  const Folder folder;
  const std::string prompt(200, 'p');
  const auto tier = held_tier_with(prompt, folder);
  World world({.tier = tier});
  const auto gone = world.ask(prompt, 12);
  tier->reads.wait(0);
  world.scheduler->cancel(world.last);
  gone->wait();
  tier->release();
  expect_right_answers(world, {"another", prompt});
  world.expect_no_block_is_held();
}

TEST(SchedulerWithATier, ADiskThatHangsIsDoneWithout) {
  const Folder folder;
  const std::string prompt(200, 'p');
  const auto tier = held_tier_with(prompt, folder);
  World world({.tier = tier, .patience = std::chrono::milliseconds(50)});
  const auto asked = world.ask(prompt, 12);
  EXPECT_EQ(asked->text(), expected(prompt, 12));
  EXPECT_EQ(asked->usage().cached_tokens, 0);
  tier->release();
  world.expect_no_block_is_held();
}

}  // namespace
}  // namespace pagedkv::engine
