// Which prefixes are reused, why not, and who is evicted (CASES class SHARE).

#include "tests/cache/world.h"

namespace pagedkv {
namespace {

TEST(Prefix, AFullBlockOutlivesItsLastHolderAndServesTheNextPrompt) {
  World w({.blocks = 4, .block_size = 16});
  w.prefill("a", tokens(0, 32));
  w.close("a");
  EXPECT_EQ(w.counts().cached, 2);
  EXPECT_EQ(w.start("b", tokens(0, 40)), 32);
}

TEST(Prefix, APartialTailIsReusedByCopy) {
  World w({.blocks = 6});
  w.prefill("a", tokens(0, 10));
  w.close("a");
  EXPECT_EQ(w.start("b", tokens(0, 12)), 10);
  EXPECT_EQ(w.core->figures().copies, 1);
  EXPECT_EQ(w.counts().cached, 1);  // the source is cached again: it was held only while it was copied
  EXPECT_TRUE(w.append("b", tokens(10, 12)).ok());
  w.expect_sound();
}

TEST(Prefix, AnOpenBlockOfALiveSequenceServesItsMatchedSlotsWhileItsOwnerWritesOn) {
  World w({.blocks = 8});
  w.prefill("a", tokens(0, 6));
  EXPECT_EQ(w.start("b", {0, 1, 2, 3, 4, 99, 98}), 5);
  EXPECT_TRUE(w.append("a", {6}).ok());  // in place: nobody holds its block any more
  EXPECT_EQ(w.core->figures().copies, 1);
  w.expect_content("a");
  w.expect_content("b");
}

TEST(Prefix, TheLastPromptTokenIsAlwaysComputed) {  // O-SHARE-06
  World w({.blocks = 8});
  for (int round = 0; round < 2; ++round) {
    const int64_t reused = w.prefill("a", tokens(0, 8));
    EXPECT_EQ(reused, round == 0 ? 0 : 7);
    if (round == 1) {
      EXPECT_EQ(w.reason, PrefixReason::kLastToken);
    }
    w.close("a");
  }
  EXPECT_EQ(w.prefill("four", tokens(0, 4)), 3);
  EXPECT_EQ(w.prefill("one", {0}), 0);
}

TEST(Prefix, TokenIdsCountInFullWidth) {  // O-SHARE-01
  World w({.blocks = 16});
  w.prefill("a", {65, 66, 67, 68, 1});
  EXPECT_EQ(w.start("b", {321, 322, 323, 324, 1}), 0);
  EXPECT_EQ(w.start("c", {65 + 65536, 66 + 65536, 67 + 65536, 68 + 65536, 1}), 0);
}

TEST(Prefix, ACollisionIsAMissAndNeverSomebodyElsesText) {  // O-SHARE-02
  World w({.blocks = 40});
  w.core->index().hash = [](const Key&, std::span<const int32_t>) { return Key{}; };
  const std::vector<int32_t> prompts[] = {tokens(0, 9), tokens(100, 109), {0, 1, 2, 3, 104, 105, 106, 107, 108}};
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 3; ++i) {
      const std::string name = std::to_string(round) + std::to_string(i);
      const int64_t reused = w.prefill(name, prompts[i]);  // content is checked
      if (round == 1) {
        EXPECT_EQ(reused, 8);
      }
      if (round == 0 && i == 1) {
        EXPECT_EQ(w.reason, PrefixReason::kCollision);
      }
      w.expect_sound();
    }
  }
}

TEST(Prefix, KeysThatAreKnownAreUsedAndThoseOfAnotherPromptFindNothing) {
  World w({.blocks = 16});
  w.prefill("a", tokens(0, 12));
  const auto own = w.core->hash_prompt(tokens(0, 12), "");
  const auto other = w.core->hash_prompt(tokens(50, 62), "");
  for (const size_t n : {0, 1, 2, 3}) {
    const std::string name = "with " + std::to_string(n);
    EXPECT_EQ(w.start(name, tokens(0, 12), {.keys = std::span(own).first(n)}), 11) << "the last token is computed";
  }
  EXPECT_EQ(w.start("short", tokens(0, 6), {.keys = own}), 5) << "more keys than the prompt has blocks";
  EXPECT_EQ(w.start("wrong", tokens(50, 62), {.keys = own}), 0) << "never somebody else's text";
  EXPECT_LE(w.start("crossed", tokens(0, 12), {.keys = other}), 4)
      << "no key fits; a block is matched by its tokens";
  w.expect_sound();
}

TEST(Prefix, NamespacesNeverShare) {  // O-SHARE-03
  World w({.blocks = 16});
  w.prefill("a", tokens(0, 9), {.name_space = "tenant a"});
  EXPECT_EQ(w.start("b", tokens(0, 9), {.name_space = "tenant b"}), 0);
  EXPECT_EQ(w.start("c", tokens(0, 9), {.name_space = "tenant a"}), 8);
}

TEST(Prefix, WhatCameBeforeABlockIsPartOfItsKey) {  // O-SHARE-05
  World w({.blocks = 16});
  w.prefill("a", {1, 2, 3, 4, 9, 9, 9, 9, 5});
  EXPECT_EQ(w.start("b", {5, 6, 7, 8, 9, 9, 9, 9, 5}), 0);
  w.prefill("c", {1, 2, 3, 4, 9, 9, 9, 9, 5}, {.name_space = "salt"});
  EXPECT_EQ(w.reason, PrefixReason::kNew);
}

TEST(Prefix, NothingAfterAMissingBlockCounts) {  // O-SHARE-07
  for (const int missing : {0, 1}) {
    World w({.blocks = 4});
    w.prefill("a", tokens(0, 13));
    w.close("a");
    // Evicting in LRU order would take the tail; holding the others makes it take this one.
    auto& pool = const_cast<BlockPool&>(w.core->pool(0));
    const auto keys = w.core->hash_prompt(tokens(0, 13), "");
    std::vector<BlockId> others;
    uint32_t entry = w.core->root("");
    for (int i = 0; i < 3; ++i) {
      entry = w.core->index().find(entry, keys[size_t(i)], tokens(4 * i, 4 * i + 4)).entry;
      if (i != missing) others.push_back(w.core->index().block(entry, 0));
    }
    for (const BlockId block : others) pool.hold(block);
    pool.evict_all_cached();
    for (const BlockId block : others) pool.drop(block);
    w.expect_sound();
    EXPECT_EQ(w.start("b", tokens(0, 13)), 4 * missing);
    EXPECT_EQ(w.reason, PrefixReason::kEvicted);
  }
}

TEST(Prefix, NoBlockIsFoundBeforeItsContentIsWritten) {  // O-SHARE-08, O-SHARE-14
  World w({.blocks = 12});
  w.start("a", tokens(0, 9));
  StepArrays step;
  ASSERT_TRUE(w.reserve({{"a", tokens(0, 9)}}, step).ok());
  EXPECT_EQ(w.start("early", tokens(0, 9)), 0);
  w.core->abandon(step);  // the request was aborted
  w.close("a");
  EXPECT_EQ(w.start("late", tokens(0, 9)), 0);
  w.start("bad", tokens(0, 9));
  ASSERT_TRUE(w.reserve({{"bad", tokens(0, 9)}}, step).ok());
  auto statuses = w.core->commit(step, {}, {Status(Code::kNotFinite, "NaN")});
  ASSERT_TRUE(statuses.ok());
  EXPECT_EQ(statuses->front().code(), Code::kNotFinite);
  EXPECT_EQ(w.core->length(w.ids["bad"]).value(), 0);
  EXPECT_EQ(w.start("after", tokens(0, 9)), 0);
  w.expect_sound();
}

TEST(Prefix, SpeculativeTokensGetNoKeyUntilTheyAreAccepted) {
  World w({.blocks = 12});
  w.prefill("a", tokens(0, 4));
  ASSERT_TRUE(w.append("a", {50, 51, 52, 53}, 1).ok());  // one of four accepted
  EXPECT_EQ(w.start("b", {0, 1, 2, 3, 50, 51, 52, 53, 54}), 5);
  w.expect_sound();
}

TEST(Evict, ABlockThatWasGivenAwayKeepsNoKey) {  // O-SHARE-09
  World w({.blocks = 4});
  w.prefill("p1", tokens(0, 8));
  w.close("p1");
  w.prefill("p2", tokens(100, 116));
  EXPECT_EQ(w.core->index().n_keys(), 4u);
  w.close("p2");
  EXPECT_EQ(w.start("again", tokens(0, 8)), 0);
  EXPECT_EQ(w.reason, PrefixReason::kEvicted);
}

TEST(Evict, TheTailOfAPromptGoesBeforeItsBeginning) {
  World w({.blocks = 4});
  w.prefill("a", tokens(0, 16));
  w.close("a");
  w.prefill("b", tokens(100, 108));
  w.close("b");
  EXPECT_EQ(w.start("c", tokens(0, 16)), 8);
}

TEST(Evict, EveryWayToTakeABlockFallsBackOnEviction) {  // O-SHARE-11
  World w({.blocks = 4});
  const auto fill = [&] {
    w.prefill("filler", tokens(1000, 1016));
    w.close("filler");
    EXPECT_EQ(w.counts().free, 0);
  };
  fill();
  w.prefill("prefill", tokens(0, 4));          // prefill
  EXPECT_TRUE(w.append("prefill", {4}).ok());  // decode crossing a boundary
  w.fork("prefill", "fork");
  EXPECT_TRUE(w.append("fork", {9}).ok());  // copy on write
  w.close("fork");
  w.close("prefill");
  w.prefill("x", tokens(2000, 2008));
  w.close("x");
  EXPECT_GT(w.start("partial", {0, 1, 2, 3, 4, 5}) + 1, 0);  // copy of a partial hit
  w.expect_sound();
}

TEST(Evict, ABlockThatIsHitAgainIsNeverGivenAway) {  // O-SHARE-12
  World w({.blocks = 3});
  w.prefill("p1", tokens(0, 5));
  w.close("p1");
  EXPECT_EQ(w.start("again", tokens(0, 5)), 4);
  w.start("new", tokens(50, 53));
  StepArrays step;
  ASSERT_TRUE(w.reserve({{"again", {4}}, {"new", tokens(50, 53)}}, step).ok());
  w.compute(step, {{"again", {4}}, {"new", tokens(50, 53)}});
  ASSERT_TRUE(w.core->commit(step, {}, {}).ok());
  w.history["again"].push_back(4);
  w.history["new"] = tokens(50, 53);
  w.expect_content("again");
  w.expect_content("new");
  EXPECT_EQ(w.live(), 3);
}

TEST(Evict, CachedAndLiveStayInsideTheCap) {  // O-MEM-04
  World w({.blocks = 16, .block_size = 16});
  for (int i = 0; i < 200; ++i) {
    w.prefill("p", tokens(1000 * i, 1000 * i + 64));
    w.close("p");
    EXPECT_LE(w.counts().cached + w.live(), 16);
    w.expect_sound();
  }
  EXPECT_LE(w.core->index().size(), 40u);
}

TEST(Share, ALentPrefixIsNeverWrittenByItsUser) {  // O-SHARE-13
  World w({.blocks = 12});
  w.prefill("entry", tokens(0, 10));
  w.close("entry");
  EXPECT_EQ(w.start("x", tokens(0, 11), {.store = false}), 10);
  EXPECT_TRUE(w.append("x", tokens(500, 506)).ok());
  EXPECT_EQ(w.start("y", tokens(0, 11)), 10);  // content is checked
  w.expect_content("x");
  w.expect_sound();
}

TEST(Share, EqualPromptsAtTheSameMomentKeepOneKeyInOnePlace) {
  World w({.blocks = 16});
  w.start("a", tokens(0, 9));
  w.start("b", tokens(0, 9));
  StepArrays step;
  ASSERT_TRUE(w.reserve({{"a", tokens(0, 9)}, {"b", tokens(0, 9)}}, step).ok());
  w.compute(step, {{"a", tokens(0, 9)}, {"b", tokens(0, 9)}});
  ASSERT_TRUE(w.core->commit(step, {}, {}).ok());
  w.history["a"] = w.history["b"] = tokens(0, 9);
  EXPECT_EQ(w.core->index().n_keys(), 2u);
  w.expect_sound();
  w.close("a");
  EXPECT_EQ(w.start("c", tokens(0, 9)), 8);
  w.expect_sound();
}

TEST(Share, AWindowGroupLimitsAHitToWhatItStillHolds) {
  World w({.blocks = 10, .windows = {0, 6}});
  w.prefill("a", tokens(0, 24));
  w.close("a");
  EXPECT_EQ(w.start("b", tokens(0, 25)), 24);
  w.close("b");
  // Another prompt takes window blocks until the old ones are gone; the full group still has its own.
  const auto evict_window = tokens(500, 516);
  w.prefill("c", evict_window);
  w.close("c");
  const int64_t reused = w.start("d", tokens(0, 25));
  EXPECT_LE(reused, 24);
  w.expect_content("d");
  w.expect_sound();
}

TEST(Share, TurningItOffLeavesNoKeys) {
  World w({.blocks = 8, .sharing = false});
  w.prefill("a", tokens(0, 9));
  EXPECT_EQ(w.start("b", tokens(0, 9)), 0);
  EXPECT_EQ(w.reason, PrefixReason::kOff);
  EXPECT_EQ(w.core->index().size(), 0u);
}

TEST(Share, RowsWithoutTokenIdsEndTheShareablePart) {
  World w({.blocks = 8});
  w.prefill("a", tokens(0, 6));
  StepArrays step;
  const StepRequest request{w.ids["a"], {}, Tokens(6)};
  ASSERT_TRUE(w.core->reserve({&request, 1}, step).ok());
  ASSERT_TRUE(w.core->commit(step, {}, {}).ok());
  EXPECT_EQ(w.core->length(w.ids["a"]).value(), 12);
  w.close("a");
  EXPECT_EQ(w.start("b", tokens(0, 12)), 4);
  w.expect_sound();
}

}  // namespace
}  // namespace pagedkv
