// What every tier does. A new one joins the list at the end.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "tests/store/tier_world.h"

namespace pagedkv {
namespace {

using std::chrono::seconds;

struct Store {
  virtual ~Store() = default;
  virtual Tier& tier() = 0;
};

struct DiskStore : Store {
  Folder folder;
  std::unique_ptr<Tier> disk = folder.open();
  Tier& tier() override { return *disk; }
};

using Make = std::unique_ptr<Store> (*)();
class EveryTier : public testing::TestWithParam<std::pair<const char*, Make>> {
 protected:
  std::unique_ptr<Store> store = GetParam().second();
  Tier& tier = store->tier();
};

TEST_P(EveryTier, GivesBackWhatWasPut) {
  for (const int64_t bytes : {1, 100, 4096, 65536, 195776}) {
    const Sample sample(uint32_t(bytes), 0, bytes);
    EXPECT_EQ(get(tier, sample), TierOutcome::kMissing);
    EXPECT_EQ(put(tier, sample), TierOutcome::kDone);
    EXPECT_EQ(put(tier, sample), TierOutcome::kDone);  // it is there already
    EXPECT_EQ(get(tier, sample), TierOutcome::kDone);
  }
  EXPECT_EQ(tier.stats().blocks, 5);
}

TEST_P(EveryTier, KeepsTheGroupsOfABlockApart) {
  const Sample full(1, 0, 4096, 0), window(1, 0, 1024, 1);
  EXPECT_EQ(put(tier, full), TierOutcome::kDone);
  EXPECT_EQ(get(tier, window), TierOutcome::kMissing);
  EXPECT_EQ(put(tier, window), TierOutcome::kDone);
  EXPECT_EQ(get(tier, window), TierOutcome::kDone);
  EXPECT_EQ(get(tier, full), TierOutcome::kDone);
}

TEST_P(EveryTier, DoesNotStoreWhatHasNoBeginning) {
  EXPECT_EQ(put(tier, Sample(8, 1, 4096)), TierOutcome::kOrphan);
  const Sample head(8, 0, 4096), next(8, 1, 4096), last(8, 2, 4096);
  TierPut batch[] = {head.put(), next.put(), last.put()};
  tier.put(batch, later());
  for (const TierPut& item : batch) EXPECT_EQ(item.outcome, TierOutcome::kDone);
}

TEST_P(EveryTier, CountsTheLeadingBlocksAndStopsAtTheFirstThatIsMissing) {
  std::vector<Key> keys;
  for (uint32_t i = 0; i < 6; ++i) {
    const Sample sample(2, i, 2048);
    keys.push_back(sample.block.key);
    EXPECT_EQ(put(tier, sample), TierOutcome::kDone);
  }
  EXPECT_TRUE(tier.remove({&keys[4], 1}, later()));
  EXPECT_EQ(tier.leading(keys, 0, later()), 4);
  EXPECT_EQ(tier.leading(keys, 1, later()), 0);
  std::vector<std::unique_ptr<Sample>> samples;
  std::vector<std::vector<std::byte>> images(6, std::vector<std::byte>(2048));
  std::vector<TierGet> gets;
  for (uint32_t i = 0; i < 6; ++i) {
    samples.push_back(std::make_unique<Sample>(2, i, 2048));
    gets.push_back({.block = samples[i]->block, .image = images[i]});
  }
  tier.get(gets, later());
  for (uint32_t i = 0; i < 6; ++i)
    EXPECT_EQ(gets[i].outcome, i < 4 ? TierOutcome::kDone : TierOutcome::kMissing) << i;
}

// What a forger, a mix-up or a stale entry would bring: the key alone proves nothing.
TEST_P(EveryTier, RefusesABlockThatDiffersInAnythingAndDeletesIt) {
  ASSERT_EQ(put(tier, Sample(3, 6, 4096, 9)), TierOutcome::kOrphan);
  for (uint32_t i = 0; i < 7; ++i) ASSERT_EQ(put(tier, Sample(3, i, 4096)), TierOutcome::kDone);
  const auto differs = [&](const char* what, auto change) {
    const Sample stored(3, 7, 4096);
    ASSERT_EQ(put(tier, stored), TierOutcome::kDone);
    Sample asked(3, 7, 4096);
    change(asked);
    EXPECT_EQ(get(tier, asked), TierOutcome::kRefused) << what;
    EXPECT_EQ(get(tier, stored), TierOutcome::kMissing) << what;
  };
  differs("parent", [](Sample& s) { s.block.parent.bytes[31] ^= 1; });
  differs("descriptor", [](Sample& s) { s.block.descriptor.bytes[0] ^= 1; });
  differs("depth", [](Sample& s) { ++s.block.depth; });
  differs("a token", [](Sample& s) { s.tokens[15] ^= 1; });
  differs("number of tokens", [](Sample& s) { s.block.tokens = s.block.tokens.first(15); });
  differs("a longer image", [](Sample& s) { s.image.resize(4097); });
  differs("a shorter image", [](Sample& s) { s.image.resize(4095); });
  differs("a huge image", [](Sample& s) { s.image.resize(1 << 22); });
  EXPECT_EQ(tier.stats().gets[int(TierOutcome::kRefused)], 8);
  EXPECT_EQ(tier.stats().blocks, 7);
}

TEST_P(EveryTier, RemovesEveryGroupOfABlock) {
  const Sample full(4, 0, 4096, 0), window(4, 0, 1024, 1), other(4, 1, 4096);
  for (const Sample* sample : {&full, &window, &other}) EXPECT_EQ(put(tier, *sample), TierOutcome::kDone);
  EXPECT_TRUE(tier.remove({&full.block.key, 1}, later()));
  EXPECT_EQ(get(tier, full), TierOutcome::kMissing);
  EXPECT_EQ(get(tier, window), TierOutcome::kMissing);
  EXPECT_EQ(get(tier, other), TierOutcome::kDone);
}

TEST_P(EveryTier, DoesNothingAfterTheDeadline) {
  const Deadline past = std::chrono::steady_clock::now() - seconds(1);
  const Sample stored(5, 0, 4096), sample(5, 1, 4096);
  EXPECT_EQ(put(tier, stored), TierOutcome::kDone);
  TierPut item = sample.put();
  tier.put({&item, 1}, past);
  EXPECT_EQ(item.outcome, TierOutcome::kLate);
  std::vector<std::byte> image(4096);
  TierGet got{.block = stored.block, .image = image};
  tier.get({&got, 1}, past);
  EXPECT_EQ(got.outcome, TierOutcome::kLate);
  EXPECT_EQ(tier.leading({&stored.block.key, 1}, 0, past), 0);
  EXPECT_FALSE(tier.remove({&stored.block.key, 1}, past));
  EXPECT_EQ(get(tier, stored), TierOutcome::kDone);
}

TEST_P(EveryTier, ForgetsABlockWhenItsTimeIsOver) {
  const Sample brief(6, 0, 4096), lasting(7, 0, 4096);
  EXPECT_EQ(put(tier, brief, seconds(1)), TierOutcome::kDone);
  EXPECT_EQ(put(tier, lasting, seconds(100000)), TierOutcome::kDone);
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  EXPECT_EQ(get(tier, brief), TierOutcome::kMissing);
  tier.tick();
  EXPECT_EQ(tier.stats().blocks, 1);
  EXPECT_EQ(tier.stats().expired, 1);
  EXPECT_EQ(get(tier, lasting), TierOutcome::kDone);
}

TEST_P(EveryTier, StoresABlockAgainWhoseTimeIsOver) {
  const Sample sample(6, 0, 4096);
  EXPECT_EQ(put(tier, sample, seconds(1)), TierOutcome::kDone);
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  EXPECT_EQ(put(tier, sample), TierOutcome::kDone);  // nobody has cleared it away yet
  EXPECT_EQ(get(tier, sample), TierOutcome::kDone);
}

TEST_P(EveryTier, IsNotTheForkedChilds) {
  for (uint32_t i = 0; i < 20; ++i) EXPECT_EQ(put(tier, Sample(i, 0, 30000)), TierOutcome::kDone);
  const pid_t child = fork();
  if (child == 0) {
    int down = 0;
    for (uint32_t i = 0; i < 20; ++i) {
      down += get(tier, Sample(i, 0, 30000)) == TierOutcome::kDown;
      down += put(tier, Sample(100 + i, 0, 30000)) == TierOutcome::kDown;
    }
    tier.tick();
    store.reset();
    _exit(down == 40 ? 0 : 1);
  }
  for (uint32_t i = 20; i < 40; ++i) EXPECT_EQ(put(tier, Sample(i, 0, 30000)), TierOutcome::kDone);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  for (uint32_t i = 0; i < 40; ++i) EXPECT_EQ(get(tier, Sample(i, 0, 30000)), TierOutcome::kDone) << i;
}

TEST_P(EveryTier, ServesManyThreadsAtOnce) {
  const auto work = [&](uint32_t seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 300; ++i) {
      const Sample sample(random() % 40, 0, 20000);
      if (random() % 2 == 0) {
        EXPECT_EQ(put(tier, sample), TierOutcome::kDone);
      } else {
        const TierOutcome outcome = get(tier, sample);
        EXPECT_TRUE(outcome == TierOutcome::kDone || outcome == TierOutcome::kMissing) << int(outcome);
      }
      if (random() % 50 == 0) tier.tick();
      if (random() % 20 == 0) tier.remove({&sample.block.key, 1}, later());
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < 4; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(tier.stats().gets[int(TierOutcome::kRefused)], 0);
}

INSTANTIATE_TEST_SUITE_P(Tiers, EveryTier,
                         testing::Values(std::pair<const char*, Make>(
                             "disk", [] { return std::unique_ptr<Store>(std::make_unique<DiskStore>()); })),
                         [](const auto& test) { return test.param.first; });

}  // namespace
}  // namespace pagedkv
