// Which tokens a step takes, without a model.
#include "engine/batch.h"

#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

namespace pagedkv::engine {
namespace {

using Pending = std::vector<int64_t>;
using Step = std::vector<std::pair<size_t, int64_t>>;

Step step_of(const std::vector<Share>& shares) {
  Step step;
  for (const Share& share : shares) step.emplace_back(share.sequence, share.n_tokens);
  return step;
}
int64_t n_tokens(const std::vector<Share>& shares) {
  return std::accumulate(shares.begin(), shares.end(), int64_t{0},
                         [](int64_t n, const Share& share) { return n + share.n_tokens; });
}

TEST(Batch, AnswersComeFirstAndPromptsShareWhatIsLeftTheOldestFirst) {
  Batcher batcher(Tokens(10), 0);
  EXPECT_EQ(step_of(batcher.choose(Pending{6, 1, 20, 1, 5})), (Step{{1, 1}, {3, 1}, {0, 6}, {2, 2}}));
}

TEST(Batch, NothingRunsNothingIsTaken) {
  Batcher batcher(Tokens(10), 0);
  EXPECT_TRUE(batcher.choose({}).empty());
}

TEST(Batch, AnswersThatDoNotFitIntoOneStepTakeTurns) {
  Batcher batcher(Tokens(2), 0);
  const Pending five(5, 1);
  EXPECT_EQ(step_of(batcher.choose(five)), (Step{{0, 1}, {1, 1}}));
  EXPECT_EQ(step_of(batcher.choose(five)), (Step{{2, 1}, {3, 1}}));
  EXPECT_EQ(step_of(batcher.choose(five)), (Step{{4, 1}, {0, 1}}));
}

TEST(Batch, APromptWithoutAnswersBesideItIsNotCutForTime) {
  Batcher batcher(Tokens(512), 0.001);
  batcher.learn(std::vector<Share>{{0, 512}}, 10);
  EXPECT_EQ(step_of(batcher.choose(Pending{700})), (Step{{0, 512}}));
}

TEST(Batch, BesideAnAnswerAChunkIsAsLongAsTheTimeOfAStepAllows) {
  Batcher batcher(Tokens(512), 0.1);
  const Pending pending{1, 700};
  EXPECT_EQ(n_tokens(batcher.choose(pending)), 512) << "nothing is known yet";
  batcher.learn(std::vector<Share>{{0, 1}}, 0.02);            // an answer alone
  batcher.learn(std::vector<Share>{{0, 1}, {1, 100}}, 0.12);  // a millisecond for each token of a prompt
  EXPECT_NEAR(double(batcher.choose(pending).at(1).n_tokens), 80, 1);
}

TEST(Batch, AChunkNeverShrinksBelowSixteen) {
  Batcher batcher(Tokens(512), 0.1);
  batcher.learn(std::vector<Share>{{0, 1}}, 5);
  batcher.learn(std::vector<Share>{{0, 512}}, 100);
  EXPECT_EQ(step_of(batcher.choose(Pending{1, 700})), (Step{{0, 1}, {1, 16}}));
}

TEST(Batch, ASlowerModelShortensChunksLittleByLittle) {
  Batcher batcher(Tokens(512), 0.1);
  const Pending pending{1, 700};
  batcher.learn(std::vector<Share>{{1, 100}}, 0.1);
  const int64_t before = batcher.choose(pending).at(1).n_tokens;
  batcher.learn(std::vector<Share>{{1, 100}}, 0.2);
  const int64_t after = batcher.choose(pending).at(1).n_tokens;
  EXPECT_LT(after, before);
  EXPECT_GT(after, before / 2) << "one slow step does not decide";
}

TEST(Batch, AFewTokensOfAPromptTeachNothing) {
  Batcher batcher(Tokens(512), 0.1);
  batcher.learn(std::vector<Share>{{0, 4}}, 1);
  EXPECT_EQ(n_tokens(batcher.choose(Pending{1, 700})), 512);
}

}  // namespace
}  // namespace pagedkv::engine
