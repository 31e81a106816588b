// Who may run now, without a model or a cache.
#include "engine/admission.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

namespace pagedkv::engine {
namespace {

// Room for 4 sequences, 100 tokens of it promised to those that run, 20 kept for each choice that comes.
Room busy() { return {.sequences = 4, .promised = Tokens(100), .growth = Tokens(20)}; }

TEST(Admission, ASequenceRunsWhenThePoolHoldsItItsGrowthAndWhatIsPromised) {
  EXPECT_EQ(judge(busy(), {.to_compute = Tokens(80), .available = Tokens(200)}), Verdict::kAdmit);
  EXPECT_EQ(judge(busy(), {.to_compute = Tokens(81), .available = Tokens(200)}), Verdict::kLetPass);
}

TEST(Admission, EveryChoiceNeedsItsPlaceAndItsGrowth) {
  EXPECT_EQ(judge(busy(), {.choices = 4, .to_compute = Tokens(20), .available = Tokens(200)}), Verdict::kAdmit);
  EXPECT_EQ(judge(busy(), {.choices = 4, .to_compute = Tokens(21), .available = Tokens(200)}), Verdict::kLetPass);
  EXPECT_EQ(judge(busy(), {.choices = 5, .to_compute = Tokens(1), .available = Tokens(9999)}), Verdict::kLetPass);
}

TEST(Admission, WhoComesWhenNobodyRunsIsNotAskedForRoom) {
  const Room idle{.sequences = 4, .nobody_runs = true, .growth = Tokens(20)};
  EXPECT_EQ(judge(idle, {.to_compute = Tokens(500), .available = Tokens(10)}), Verdict::kAdmit);
}

TEST(Admission, WhoWasPassedEightTimesHoldsAllBehindIt) {
  const Need large{.to_compute = Tokens(5000), .available = Tokens(200), .times_passed = 7};
  EXPECT_EQ(judge(busy(), large), Verdict::kLetPass);
  EXPECT_EQ(judge(busy(), {.to_compute = Tokens(5000), .available = Tokens(200), .times_passed = 8}),
            Verdict::kHoldAll);
}

TEST(Admission, WhoWasPassedOftenStillRunsOnceItFits) {
  EXPECT_EQ(judge(busy(), {.to_compute = Tokens(80), .available = Tokens(200), .times_passed = 8}),
            Verdict::kAdmit);
}

// One key a letter: a prompt is a word, and its blocks hold four tokens.
std::vector<PrefixKey> keys_of(std::string_view word) {
  std::vector<PrefixKey> keys;
  for (const char c : word) keys.push_back({.bytes = {uint8_t(c)}});
  return keys;
}
int64_t soon(std::string_view prompt, std::string_view other, int64_t computed) {
  return soon_cached(keys_of(prompt), keys_of(other), Tokens(computed), Tokens(4)).n;
}

TEST(Admission, APromptThatBeginsAlikeAndIsBeingComputedIsWorthWaitingFor) {
  EXPECT_EQ(soon("abcx", "abcy", 0), 12);
  EXPECT_EQ(soon("abcx", "abcy", 11), 12) << "the third block is not stored yet";
  EXPECT_EQ(soon("ab", "abcd", 0), 8) << "no more than the prompt itself";
}

TEST(Admission, WhatIsStoredAlreadyOrBeginsOtherwiseIsNot) {
  EXPECT_EQ(soon("abcx", "abcy", 12), 0);
  EXPECT_EQ(soon("abcx", "xabc", 0), 0);
  EXPECT_EQ(soon("", "abc", 0), 0);
}

}  // namespace
}  // namespace pagedkv::engine
