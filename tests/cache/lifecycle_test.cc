// A block's life: trim, fork, free, window (CASES class LIFE at the level of block tables).

#include "tests/cache/world.h"

namespace pagedkv {
namespace {

TEST(Truncate, ToZeroGivesEveryBlockBackAndTheNextTokenIsPositionZero) {  // O-LIFE-01
  World w({.blocks = 4});
  w.prefill("a", tokens(0, 3));
  EXPECT_TRUE(w.truncate("a", 0).ok());
  EXPECT_EQ(w.held("a"), 0);
  StepArrays step;
  ASSERT_TRUE(w.reserve({{"a", {7}}}, step).ok());
  EXPECT_EQ(step.positions[0], 0);
  w.core->abandon(step);
  EXPECT_EQ(w.truncate("a", 7).code(), Code::kInvalidArgument);
  EXPECT_EQ(w.truncate("a", -1).code(), Code::kInvalidArgument);
  w.expect_sound();
}

TEST(Truncate, PastTheEndIsRefusedAndTheSameLengthChangesNothing) {  // O-LIFE-01
  World w({.blocks = 4});
  w.prefill("a", tokens(0, 3));
  EXPECT_EQ(w.truncate("a", 7).code(), Code::kInvalidArgument);
  EXPECT_EQ(w.core->length(w.ids["a"]).value(), 3);
  EXPECT_TRUE(w.truncate("a", 3).ok());
  EXPECT_EQ(w.held("a"), 1);
}

TEST(Truncate, ThenAppendReadsNothingOfWhatWasThere) {  // O-LIFE-02, O-LIFE-03
  World w({.blocks = 8});
  w.prefill("a", tokens(0, 10));
  EXPECT_TRUE(w.truncate("a", 5).ok());
  EXPECT_TRUE(w.append("a", tokens(100, 105)).ok());
  EXPECT_EQ(w.held("a"), 3);
  w.prefill("b", tokens(0, 9));
  EXPECT_TRUE(w.truncate("b", 4).ok());
  EXPECT_EQ(w.held("b"), 1);
  w.expect_sound();
}

TEST(Truncate, OfAWrappedWindowIsRefusedAndTheSequenceAnswersAsBefore) {  // O-LIFE-04
  World w({.blocks = 16, .windows = {8}});
  w.prefill("a", tokens(0, 20));
  EXPECT_EQ(w.truncate("a", 17).code(), Code::kInvalidArgument);
  w.expect_content("a");
  EXPECT_EQ(w.core->length(w.ids["a"]).value(), 20);
  EXPECT_TRUE(w.truncate("a", 19).ok());  // one token back is always possible
  EXPECT_TRUE(w.append("a", {5}).ok());
}

TEST(Truncate, LayersOfDifferentGroupsNeverDiffer) {  // O-LIFE-05
  World w({.blocks = 24, .windows = {0, 8}});
  w.prefill("a", tokens(0, 3));
  int64_t live_after_first = -1;
  for (int round = 0; round < 10; ++round) {
    const int64_t length = w.core->length(w.ids["a"]).value();
    EXPECT_TRUE(w.append("a", tokens(int32_t(length), 30)).ok());
    EXPECT_EQ(w.truncate("a", 8).code(), Code::kInvalidArgument);
    EXPECT_EQ(w.core->length(w.ids["a"]).value(), 30);
    w.expect_content("a");
    EXPECT_TRUE(w.truncate("a", 0).ok());  // what the caller falls back to
    EXPECT_TRUE(w.append("a", tokens(0, 8)).ok());
    const int64_t live = w.live(0) + w.live(1);
    if (round == 0) live_after_first = live;
    EXPECT_EQ(live, live_after_first);
  }
  w.expect_sound();
}

TEST(Fork, TheLastBlockIsCopiedOnceAndEachBranchSeesItsOwnToken) {  // O-LIFE-07
  World w({.blocks = 8});
  w.prefill("parent", tokens(0, 6));
  w.fork("parent", "child");
  const BlockId full = w.core->table(w.ids["parent"], 0).value()[0];
  EXPECT_TRUE(w.append("parent", {100}).ok());
  EXPECT_TRUE(w.append("child", {200}).ok());
  EXPECT_EQ(w.core->pool(0).holders(full), 2u);
  EXPECT_EQ(w.core->figures().copies, 1);
  w.expect_content("parent");
  w.expect_content("child");
}

TEST(Fork, WhatTheChildDoesNeverReachesTheParent) {  // O-LIFE-08
  World w({.blocks = 12});
  w.prefill("parent", tokens(0, 10));
  const auto before = w.core->table(w.ids["parent"], 0).value();
  const std::vector<BlockId> table(before.begin(), before.end());
  w.fork("parent", "child");
  const auto same = [&] {
    w.expect_content("parent");
    w.expect_sound();
    EXPECT_TRUE(std::ranges::equal(w.core->table(w.ids["parent"], 0).value(), table));
  };
  EXPECT_TRUE(w.truncate("child", 7).ok());
  same();
  EXPECT_TRUE(w.append("child", tokens(50, 55)).ok());
  same();
  EXPECT_TRUE(w.truncate("child", 2).ok());
  same();
  w.close("child");
  same();
}

TEST(Fork, TenGenerationsKeepTheFirstTokensAsTheyWere) {  // O-LIFE-09 (images are copied, never requantized)
  World w({.blocks = 8});
  w.prefill("g0", tokens(0, 6));
  for (int i = 0; i < 10; ++i) {
    const std::string old_name = "g" + std::to_string(i), new_name = "g" + std::to_string(i + 1);
    w.fork(old_name, new_name);
    EXPECT_TRUE(w.truncate(new_name, 6).ok());
    EXPECT_TRUE(w.append(new_name, {1000 + i}).ok());
    w.close(old_name);
    w.expect_content(new_name);
    w.expect_sound();
  }
}

TEST(Release, ForkedSequencesThatWentAroundTheWindowFreeEachBlockOnce) {  // O-LIFE-11
  World w({.blocks = 12, .windows = {8}, .sharing = false});
  w.prefill("a", tokens(0, 12));
  w.fork("a", "c");
  EXPECT_TRUE(w.append("a", tokens(12, 20)).ok());
  EXPECT_TRUE(w.append("c", tokens(30, 38)).ok());
  w.close("a");
  w.expect_sound();
  w.close("c");
  w.expect_sound();
  EXPECT_EQ(w.counts().free, 12);
}

TEST(Release, AStaleHandleReachesNobody) {  // O-LIFE-12
  World w({.blocks = 8});
  w.prefill("old", tokens(0, 5));
  const SequenceId stale = w.ids["old"];
  w.close("old");
  w.prefill("new", tokens(100, 105));
  EXPECT_EQ(w.ids["new"].index, stale.index);
  StepArrays step;
  const StepRequest request{stale, {}, Tokens(1)};
  EXPECT_EQ(w.core->reserve({&request, 1}, step).code(), Code::kStale);
  EXPECT_EQ(w.core->truncate(stale, 0).code(), Code::kStale);
  EXPECT_EQ(w.core->fork(stale).status().code(), Code::kStale);
  EXPECT_EQ(w.core->release(stale).code(), Code::kStale);
  EXPECT_EQ(w.core->length(stale).status().code(), Code::kStale);
  EXPECT_EQ(w.core->table(stale, 0).status().code(), Code::kStale);
  w.expect_content("new");
  w.expect_sound();
}

TEST(Release, InTheMiddleOfAStepKeepsTheBlocksUntilTheStepEnds) {
  World w({.blocks = 4, .sharing = false});
  w.prefill("a", tokens(0, 6));
  StepArrays step;
  ASSERT_TRUE(w.reserve({{"a", tokens(6, 10)}}, step).ok());
  const SequenceId a = w.ids["a"];
  EXPECT_TRUE(w.core->release(a).ok());
  EXPECT_EQ(w.core->length(a).status().code(), Code::kStale);
  EXPECT_EQ(w.live(), 3);  // the step's kernels may still write there
  auto statuses = w.core->commit(step, {}, {});
  ASSERT_TRUE(statuses.ok());
  EXPECT_EQ(statuses->front().code(), Code::kStale);
  EXPECT_EQ(w.live(), 0);
  w.expect_sound();
}

TEST(Window, AForkAfterTheWindowMovedTakesNoReferenceOnBlocksThatWereGivenBack) {  // O-LIFE-13
  World w({.blocks = 6, .windows = {8}, .sharing = false});
  w.prefill("a", tokens(0, 16));
  w.prefill("c", tokens(777, 777 + 8));
  w.fork("a", "fork");
  w.close("fork");
  w.expect_content("c");
  w.expect_content("a");
  EXPECT_EQ(w.held("c"), 2);
  w.expect_sound();
}

TEST(Window, EveryLengthKeepsTheBlocksOfTheLastWPositions) {  // O-LIFE-14, O-LIFE-15
  World w({.blocks = 20, .windows = {6}});
  w.start("a", tokens(0, 1));
  for (int32_t n = 0; n < 40; ++n) {
    ASSERT_TRUE(w.append("a", {n}).ok());  // checks every position the window still shows
    if (n + 1 != 13) continue;
    const auto table = w.core->table(w.ids["a"], 0).value();
    EXPECT_EQ(table[0], kNoBlock);
    for (size_t kept : {1u, 2u, 3u}) EXPECT_NE(table[kept], kNoBlock);
  }
  EXPECT_LE(w.held("a"), 3);
}

TEST(Window, BlocksOfAWindowGroupStayFlatWhileTheFullGroupGrows) {
  World w({.blocks = 200, .windows = {0, 16}, .sharing = false});
  w.prefill("a", tokens(0, 100));
  const int64_t held = w.held("a", 1);
  for (int32_t n = 100; n < 600; ++n) ASSERT_TRUE(w.append("a", {n}).ok());
  EXPECT_EQ(w.held("a", 0), 150);
  EXPECT_LE(w.held("a", 1), held + 1);
}

TEST(Window, OfOneTokenRefusesALengthWhoseLastBlockIsGoneAndTakesAnyOther) {
  for (const int32_t length : {15, 20}) {
    World w({.blocks = 16, .windows = {0, 1}});
    w.prefill("a", tokens(0, length));
    const Status status = w.truncate("a", 10);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find("length 10 needs the block of positions 8 to 11, the window of 1"),
              std::string::npos)
        << status.message();
    EXPECT_TRUE(w.append("a", tokens(50, 52)).ok());
    ASSERT_TRUE(w.truncate("a", 8).ok());  // the next token begins a block, and sees itself alone
    for (int32_t n = 0; n < 9; ++n) ASSERT_TRUE(w.append("a", {n}).ok());
    w.expect_sound();
    EXPECT_LE(w.held("a", 1), 2);
  }
}

TEST(Window, AHitHoldsWhatTheLastTokenSeesSoThatItCanBeTakenBack) {
  for (const int64_t window : {1, 4, 5, 6, 9, 13}) {
    World w({.blocks = 40, .windows = {0, window}});
    w.prefill("a", tokens(0, 14));
    ASSERT_EQ(w.start("b", tokens(0, 13)), 12) << window;
    const ReadRequest last{w.ids["b"], Tokens(1)};
    StepArrays plan;
    EXPECT_TRUE(w.core->read({&last, 1}, plan).ok()) << window;
    const Status status = w.truncate("b", 11);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(w.append("b", {1, 2}).ok());
    w.expect_sound();
  }
}

TEST(Read, APlanIsStaleOnceItsSequenceHasChanged) {
  World w({.blocks = 8, .sharing = false});
  w.prefill("a", tokens(0, 6));
  const auto plan_of_a = [&w] {
    const ReadRequest request{w.ids["a"], Tokens(1)};
    StepArrays plan;
    EXPECT_TRUE(w.core->read({&request, 1}, plan).ok());
    return plan;
  };
  const StepArrays first = plan_of_a();
  w.prefill("other", tokens(20, 23));
  EXPECT_TRUE(w.core->check_current(first).ok()) << "another sequence changes nothing for it";

  // Its tail is copied away beside a fork; the fork's end frees the block that the plan names.
  w.fork("a", "b");
  StepArrays step;
  ASSERT_TRUE(w.reserve({{"a", {7}}}, step).ok());
  w.close("b");
  w.prefill("c", tokens(40, 44));
  EXPECT_EQ(w.core->check_current(first).code(), Code::kStale);
  w.core->abandon(step);
  EXPECT_EQ(w.core->check_current(first).code(), Code::kStale);

  const StepArrays second = plan_of_a();
  EXPECT_TRUE(w.truncate("a", 6).ok());  // the same length: no change
  EXPECT_TRUE(w.core->check_current(second).ok());
  EXPECT_TRUE(w.truncate("a", 5).ok());
  EXPECT_EQ(w.core->check_current(second).code(), Code::kStale);

  const StepArrays third = plan_of_a();
  w.close("a");
  EXPECT_EQ(w.core->check_current(third).code(), Code::kStale);
}

TEST(Step, AReserveThatCannotBeMetChangesNothing) {
  World w({.blocks = 4, .sharing = false});
  w.prefill("a", tokens(0, 6));
  w.prefill("b", tokens(20, 22));
  StepArrays step;
  const Status status = w.reserve({{"a", tokens(6, 8)}, {"b", tokens(22, 40)}}, step);
  EXPECT_EQ(status.code(), Code::kCapacity);
  EXPECT_NE(status.message().find("need 20 tokens (4 blocks), have 4 tokens (1 blocks)"), std::string::npos)
      << status.message();
  EXPECT_EQ(w.live(), 3);
  w.expect_sound();
  EXPECT_TRUE(w.append("a", tokens(6, 8)).ok());
}

TEST(Step, BadRequestsNameWhatIsWrong) {
  World w({.blocks = 4});
  w.prefill("a", tokens(0, 2));
  StepArrays step;
  EXPECT_EQ(w.reserve({{"a", {1}}, {"a", {2}}}, step).code(), Code::kInvalidArgument);
  EXPECT_EQ(w.reserve({{"a", {}}}, step).code(), Code::kInvalidArgument);
  ASSERT_TRUE(w.reserve({{"a", {1, 2, 3}}}, step).ok());
  StepArrays second;
  EXPECT_EQ(w.reserve({{"a", {1}}}, second).code(), Code::kInvalidArgument);
  EXPECT_EQ(w.truncate("a", 1).code(), Code::kInvalidArgument);
  EXPECT_EQ(w.core->fork(w.ids["a"]).status().code(), Code::kInvalidArgument);
  const Tokens too_many(4);
  EXPECT_EQ(w.core->commit(step, {&too_many, 1}, {}).status().code(), Code::kInvalidArgument);
  const Tokens two(2);
  EXPECT_TRUE(w.core->commit(step, {&two, 1}, {}).ok());
  EXPECT_EQ(w.core->commit(step, {}, {}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(w.core->length(w.ids["a"]).value(), 4);
  w.expect_sound();
}

TEST(Growth, ARefusalOfTheSystemIsToldApartFromAFullPool) {
  World w({.blocks = 8, .floor = 1, .sharing = false});
  w.start("a", {});
  w.source().fail_after = 0;
  const Status refused = w.append("a", tokens(0, 8));
  EXPECT_EQ(refused.code(), Code::kNoMemory);
  EXPECT_NE(refused.message().find("need 8 tokens (2 blocks), have 4 tokens (1 blocks)"), std::string::npos)
      << refused.message();
  w.expect_sound();
  w.source().fail_after = -1;
  EXPECT_TRUE(w.append("a", tokens(0, 32)).ok());
  EXPECT_EQ(w.append("a", {1}).code(), Code::kCapacity);
}

TEST(Step, MoreTokensThanPlansCanCountAreRefused) {
  World w({.blocks = 8});
  w.prefill("a", tokens(0, 2));
  w.prefill("b", tokens(10, 12));
  const StepRequest huge[] = {{.sequence = w.ids["a"], .n_tokens = Tokens(int64_t{1} << 30)},
                              {.sequence = w.ids["b"], .n_tokens = Tokens(int64_t{1} << 30)}};
  StepArrays step;
  EXPECT_EQ(w.core->reserve(huge, step).code(), Code::kInvalidArgument);
  w.expect_sound();
  EXPECT_TRUE(w.append("b", {1}).ok());
}

TEST(Growth, OneTokenAtATimeFailsAtTheCapWithTheFirstTokensIntact) {  // O-MEM-01
  World w({.blocks = 64, .floor = 1, .sharing = false});
  w.start("a", {});
  for (int32_t n = 0; n < 256; ++n) ASSERT_TRUE(w.append("a", {n}).ok());
  EXPECT_EQ(w.append("a", {256}).code(), Code::kCapacity);
  w.expect_content("a");
  w.close("a");
  EXPECT_EQ(w.counts().free, w.counts().total);
  EXPECT_LE(w.counts().total, 2);  // the floor, and at most one extent kept at hand
}

TEST(Growth, ScatteredBlocksServeALongSequence) {  // O-MEM-07
  World w({.blocks = 8, .sharing = false});
  for (int i = 0; i < 8; ++i) w.prefill("s" + std::to_string(i), tokens(10 * i, 10 * i + 4));
  for (int i = 0; i < 8; i += 2) w.close("s" + std::to_string(i));
  EXPECT_EQ(w.prefill("long", tokens(100, 116)), 0);
  for (int i = 1; i < 8; i += 2) w.expect_content("s" + std::to_string(i));
  w.expect_content("long");
}

TEST(Growth, CommittedNeverPassesInUseByMoreThanAnExtentOnTheWayUpAndDown) {
  World w({.blocks = 60, .floor = 1, .extent = 5, .sharing = false});
  for (int i = 0; i < 12; ++i) w.prefill("s" + std::to_string(i), tokens(0, 20));
  EXPECT_EQ(w.source().bytes_committed(), 60);
  for (int i = 11; i >= 0; --i) {
    w.close("s" + std::to_string(i));
    EXPECT_LE(w.source().bytes_committed(), w.live() + 5);
    w.expect_sound();
  }
}

}  // namespace
}  // namespace pagedkv
