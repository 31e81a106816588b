// A million random operations against a naive map of tokens, with every invariant checked after each.

#include <algorithm>
#include <random>

#include "tests/cache/world.h"

namespace pagedkv {
namespace {

// Sanitizers make each step an order of magnitude slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kOperations = 100'000;
#else
constexpr int kOperations = 1'000'000;
#endif

class RandomWorld {
 public:
  RandomWorld(const WorldOptions& options, uint32_t seed, bool fail_commits)
      : world_(options), random_(seed), fail_commits_(fail_commits) {}

  void run(int operations) {
    for (int i = 0; i < operations && !testing::Test::HasFailure(); ++i) {
      const bool inject = fail_commits_ && below(2) == 0;
      for (int g = 0; g < world_.core->n_groups(); ++g) world_.source(g).fail_after = inject ? below(2) : -1;
      one();
      world_.expect_sound();
    }
    for (const auto& [name, id] : std::map(world_.ids)) world_.close(name);
    while (!restores_.empty()) end_restore();
    for (const KeyedBlock& block : world_.core->take_keyed()) kept_.push_back(block);
    while (!kept_.empty()) let_go();
    world_.core->clear_cached();
    world_.expect_sound();
    for (int g = 0; g < world_.core->n_groups(); ++g) EXPECT_EQ(world_.counts(g).free, world_.counts(g).total);
    EXPECT_EQ(world_.core->index().size(), 0u);
    EXPECT_GT(hits_, operations / 100);
    EXPECT_GT(refused_, operations / 1000);
    EXPECT_GT(stale_, operations / 1000);
    if (world_.options().most_keyed > 0) {
      EXPECT_GT(restored_, operations / 1000);
    }
  }

 private:
  int below(int n) { return int(random_() % uint32_t(n)); }
  std::string any() {
    auto at = world_.ids.begin();
    std::advance(at, below(int(world_.ids.size())));
    return at->first;
  }
  // Few token values and few beginnings, so that prefixes repeat and diverge anywhere.
  std::vector<int32_t> some_tokens(int n) {
    std::vector<int32_t> list(static_cast<size_t>(n));
    for (auto& token : list) token = below(2);
    return list;
  }

  void one() {
    const int choice = below(100);
    if (world_.options().most_keyed > 0 && below(6) == 0) return tier();
    if (world_.ids.empty() || (choice < 18 && world_.ids.size() < 8)) return start();
    const std::string name = any();
    const int64_t length = int64_t(world_.history[name].size());
    if (choice < 60) {
      const auto list = some_tokens(1 + below(9));
      const int64_t accept = below(3) == 0 ? below(int(list.size()) + 1) : -1;  // speculation
      if (!world_.append(name, list, accept).ok()) {
        ++refused_;
        world_.expect_content(name);
      }
    } else if (choice < 68 && world_.ids.size() < 8) {
      world_.fork(name, fresh_name());
    } else if (choice < 78) {
      (void)world_.truncate(name, below(int(length) + 1));
      world_.expect_content(name);
    } else if (choice < 92) {
      world_.close(name);
    } else if (choice < 94) {
      batch();
    } else if (choice < 95) {
      world_.core->clear_cached();
    } else if (choice < 97) {
      read(name);
    } else if (choice < 98) {
      look_again();
    } else {
      world_.expect_content(name);
    }
  }

  // A plan that reads is kept, over whatever changes come.
  void read(const std::string& name) {
    const int64_t length = int64_t(world_.history[name].size());
    const ReadRequest request{world_.ids[name], Tokens(1 + below(3))};
    StepArrays& plan = arrays_;
    const Status status = world_.core->read({&request, 1}, plan);
    if (!status.ok()) return;
    ASSERT_LE(request.n_queries.n, length);
    world_.expect_reads(plan, 0, world_.history[name]);
    reads_.push_back({plan, name, world_.history[name]});
    if (reads_.size() > 8) reads_.erase(reads_.begin());
  }
  // One that is still current reads what it read; any other is refused.
  void look_again() {
    for (const Reading& reading : reads_) {
      const auto now = world_.history.find(reading.name);
      const bool same = now != world_.history.end() && now->second == reading.history;
      const Status status = world_.core->check_current(reading.plan);
      if (status.ok()) {
        ASSERT_TRUE(same) << "a plan of other content is current";
        world_.expect_reads(reading.plan, 0, reading.history);
      } else {
        ASSERT_EQ(status.code(), Code::kStale);
        ++stale_;
      }
    }
  }

  void start() {
    const std::vector<int32_t> prompt = some_tokens(1 + below(20));
    StartOptions options;
    if (below(4) == 0) options.name_space = "other";
    options.reuse = below(8) != 0;
    options.store = below(8) != 0;
    const std::string name = fresh_name();
    const int64_t reused = world_.start(name, prompt, options);
    hits_ += reused > 0;
    if (reused > 0 && below(4) == 0) {  // one token can be taken back, and what the last one sees be read
      const ReadRequest request{world_.ids[name], Tokens(1)};
      StepArrays plan;
      ASSERT_TRUE(world_.core->read({&request, 1}, plan).ok());
      world_.expect_reads(plan, 0, world_.history[name]);
      const Status status = world_.truncate(name, reused - 1);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    const std::vector<int32_t> rest(prompt.begin() + int64_t(world_.history[name].size()), prompt.end());
    if (!world_.append(name, rest).ok()) ++refused_;
  }

  // Blocks that got keys go into a store and come back from it, while all else goes on.
  void tier() {
    const int choice = below(10);
    if (choice < 4) {
      for (const KeyedBlock& block : world_.core->take_keyed()) {
        store_[{block.group, block.key.bytes}] = world_.image(block.group, block.block);
        kept_.push_back(block);
      }
    } else if (choice < 6 && !kept_.empty()) {
      let_go();
    } else if (choice < 8) {
      begin_restore();
    } else if (!restores_.empty()) {
      end_restore();
    }
  }
  void let_go() {
    std::swap(kept_[size_t(below(int(kept_.size())))], kept_.back());
    ASSERT_TRUE(world_.core->let_go(kept_.back().group, kept_.back().block).ok());
    kept_.pop_back();
  }
  void begin_restore() {
    if (restores_.size() > 2) return;
    Restoring one{.prompt = some_tokens(4 + below(17))};
    one.match.keys = world_.core->hash_prompt(one.prompt, "");
    int64_t n = 0;  // blocks whose full group the store has
    while (n < std::ssize(one.match.keys) && store_.contains({0, one.match.keys[size_t(n)].bytes})) ++n;
    auto begun = world_.core->begin_restore(one.prompt, one.match, n);
    if (!begun.ok()) {
      ++refused_;
      return;
    }
    one.restore = std::move(*begun);
    for (const Restore::Place& place : one.restore.places) {
      const auto found = store_.find({place.group, one.match.keys[size_t(place.index)].bytes});
      const bool fill = found != store_.end() && below(10) != 0;
      if (fill) world_.set_image(place.group, place.block, found->second);
      one.filled.push_back(fill);
    }
    restores_.push_back(std::move(one));
  }
  void end_restore() {
    const Restoring one = std::move(restores_.back());
    restores_.pop_back();
    const int64_t cached = world_.core->end_restore(one.restore, one.prompt, one.match, one.filled);
    restored_ += cached > 0 && !one.restore.places.empty();
    PrefixMatch now{.keys = one.match.keys};
    world_.core->look_up(one.prompt, now);
    ASSERT_EQ(now.cached.n, cached);
    const bool whole = std::ranges::count(one.filled, false) == 0;
    const int64_t most = (std::ssize(one.prompt) - 1) / world_.options().block_size * world_.options().block_size;
    int64_t n = 0;
    for (const Restore::Place& place : one.restore.places) n = std::max(n, place.index + 1);
    if (whole) {
      ASSERT_GE(cached, std::min(most, n * world_.options().block_size))
          << one.restore.places.size() << " places, " << one.restore.kept.size() << " kept, prompt "
          << one.prompt.size() << " first " << one.restore.places[0].index;
    }
  }

  // Several sequences in one step, of which some may leave in the middle.
  void batch() {
    std::vector<std::pair<std::string, std::vector<int32_t>>> requests;
    for (const auto& [name, id] : world_.ids)
      if (below(2) == 0) requests.push_back({name, some_tokens(1 + below(5))});
    if (requests.empty()) return;
    StepArrays& step = arrays_;
    if (!world_.reserve(requests, step).ok()) {
      ++refused_;
      return;
    }
    world_.expect_sound();
    world_.compute(step, requests);
    const bool leave = below(4) == 0, abandon = below(8) == 0;
    if (leave) {
      EXPECT_TRUE(world_.core->release(world_.ids[requests[0].first]).ok());
    }
    world_.expect_sound();
    if (abandon) {
      world_.core->abandon(step);
    } else {
      auto statuses = world_.core->commit(step, {}, {});
      ASSERT_TRUE(statuses.ok());
      for (size_t i = 0; i < requests.size(); ++i)
        ASSERT_EQ((*statuses)[i].code(), leave && i == 0 ? Code::kStale : Code::kOk);
    }
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto& [name, list] = requests[i];
      if (leave && i == 0) {
        world_.ids.erase(name);
        world_.history.erase(name);
      } else {
        if (!abandon) world_.history[name].insert(world_.history[name].end(), list.begin(), list.end());
        world_.expect_content(name);
      }
    }
  }

  std::string fresh_name() { return "s" + std::to_string(next_name_++); }

  World world_;
  std::mt19937 random_;
  bool fail_commits_;
  int next_name_ = 0;
  int64_t hits_ = 0, refused_ = 0, stale_ = 0;
  StepArrays arrays_;  // of one plan after the other, whether it read or wrote
  struct Reading {
    StepArrays plan;
    std::string name;
    std::vector<int32_t> history;
  };
  std::vector<Reading> reads_;
  struct Restoring {
    std::vector<int32_t> prompt;
    PrefixMatch match = {};
    Restore restore = {};
    std::vector<bool> filled = {};
  };
  std::map<std::pair<int, std::array<uint8_t, 32>>, std::vector<uint64_t>> store_;
  std::vector<KeyedBlock> kept_;
  std::vector<Restoring> restores_;
  int64_t restored_ = 0;
};

const WorldOptions kFull{.blocks = 40, .block_size = 4, .windows = {0}, .floor = 4, .extent = 3};
const WorldOptions kMixed{.blocks = 40, .block_size = 4, .windows = {0, 6}, .floor = 4, .extent = 3};

TEST(Model, AMillionOperationsOnAFullGroupKeepEveryInvariantAndEveryToken) {
  RandomWorld(kFull, 1, false).run(kOperations);
}
TEST(Model, TheSameWithAFailureInjectedAtCommitsOfMemory) { RandomWorld(kFull, 2, true).run(kOperations); }
TEST(Model, AFullAndAWindowGroupStayInStep) { RandomWorld(kMixed, 3, false).run(kOperations / 4); }
TEST(Model, AFullAndAWindowGroupStayInStepWhenCommitsFail) { RandomWorld(kMixed, 4, true).run(kOperations / 4); }
// A window may end anywhere in a block, and be smaller than one.
TEST(Model, WindowsOfAnyWidthStayInStep) {
  for (int64_t window = 1; window <= 10; ++window)
    RandomWorld({.blocks = 40, .block_size = 4, .windows = {0, window}, .floor = 4, .extent = 3},
                uint32_t(100 + window), window % 2 == 0)
        .run(kOperations / 40);
}
TEST(Model, BlocksThatGoToAStoreAndComeBackStayInStep) {
  WorldOptions options = kFull;
  options.most_keyed = 5;
  RandomWorld(options, 7, false).run(kOperations / 4);
  RandomWorld(options, 8, true).run(kOperations / 8);
  for (int64_t window : {1, 3, 6, 9}) {
    options = kMixed;
    options.windows = {0, window};
    options.most_keyed = 9;
    RandomWorld(options, uint32_t(200 + window), window == 3).run(kOperations / 16);
  }
}
TEST(Model, WindowsOnlyOrBlocksOfOneTokenWorkToo) {
  RandomWorld({.blocks = 14, .block_size = 4, .windows = {6}, .floor = 1, .extent = 2}, 5, false)
      .run(kOperations / 10);
  RandomWorld({.blocks = 60, .block_size = 1, .windows = {0}, .floor = 1, .extent = 7}, 6, true)
      .run(kOperations / 10);
}

// O-SHARE-10, O-MET-02 are this test at another size; O-CONC-10's owner word is the content hash.

}  // namespace
}  // namespace pagedkv
