// Answers to single prompts: how they end, what they reuse, and that nothing is left behind.
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tests/engine/files.h"
#include "tests/engine/world.h"

namespace pagedkv::engine {
namespace {

EngineOptions options_with_context(int context) {
  return {.model_path = tiny_model("d64_gqa3_tied"),
          .context = Tokens(context),
          .threads = 1,
          .num_blocks = Blocks(64),
          .kv_memory = Bytes(64 << 20),
          .chunk = Tokens(16)};
}

GenerateRequest greedy(std::vector<int32_t> prompt, int max_tokens) {
  GenerateRequest request{
      .prompt = std::move(prompt), .max_tokens = Tokens(max_tokens), .sampling = {}, .stop = {}};
  request.sampling.temperature = 0;
  return request;
}

TEST(Generate, IsTheGreedyContinuationOfTheModel) {
  World world(options_with_context(256));
  const auto prompt = random_tokens(40, world.vocab_size(), 5);
  auto result = world.engine->generate(greedy(prompt, 8));
  ASSERT_TRUE(result.ok()) << result.status().message();
  // By hand: one token after the other, from full logits.
  std::vector<int32_t> tokens = prompt;
  std::string text;
  for (int i = 0; i < 8; ++i) {
    const auto logits = world.logits(tokens, {int(tokens.size())});
    const auto row = std::span(logits).last(size_t(world.vocab_size()));
    const auto next = int32_t(std::max_element(row.begin(), row.end()) - row.begin());
    if (world.engine->text().is_end(next)) break;
    tokens.push_back(next);
    text += world.engine->text().piece(next);
  }
  EXPECT_EQ(result->tokens_in, 40);
  EXPECT_EQ(result->tokens_out, int64_t(tokens.size() - prompt.size()));
  TextStream stream;  // incomplete UTF-8 is shown as U+FFFD by both
  std::string expected = stream.push(text);
  expected += stream.finish();
  EXPECT_EQ(result->text, expected);
}

TEST(Generate, AsksOnlyForWhatTheCacheDoesNotHold) {
  World world(options_with_context(256));
  const auto prompt = random_tokens(70, world.vocab_size(), 6);
  auto first = world.engine->generate(greedy(prompt, 4));
  auto second = world.engine->generate(greedy(prompt, 4));
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->tokens_reused, 0);
  EXPECT_GE(second->tokens_reused, 64);
  EXPECT_LT(second->tokens_reused, 70);
  EXPECT_EQ(first->text, second->text);
  EXPECT_EQ(world.engine->cache().stats().sequences, 0);
}

TEST(Generate, EndsAtTheTokenLimitAndAtTheEndOfTheContext) {
  World world(options_with_context(64));
  const auto prompt = random_tokens(60, world.vocab_size(), 9);
  auto limited = world.engine->generate(greedy(prompt, 2));
  ASSERT_TRUE(limited.ok()) << limited.status().message();
  auto full = world.engine->generate(greedy(prompt, -1));
  ASSERT_TRUE(full.ok()) << full.status().message();
  if (full->finish_reason != FinishReason::kStop) {
    EXPECT_EQ(limited->tokens_out, 2);
    EXPECT_EQ(limited->finish_reason, FinishReason::kLength);
    // Positions 60 to 63 are computed, and the last of them still gives a token.
    EXPECT_EQ(full->tokens_out, 5);
    EXPECT_EQ(full->finish_reason, FinishReason::kLength);
  }
  auto none = world.engine->generate(greedy(prompt, 0));
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(none->tokens_out, 0);
  EXPECT_EQ(none->finish_reason, FinishReason::kLength);
  EXPECT_EQ(world.engine->cache().stats().sequences, 0);
}

TEST(Generate, IsCancelledByItsReader) {
  World world(options_with_context(256));
  const auto prompt = random_tokens(50, world.vocab_size(), 10);
  int calls = 0;
  auto result = world.engine->generate(greedy(prompt, -1), [&](std::string_view) { return ++calls < 2; });
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->finish_reason, FinishReason::kCancelled);
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(world.engine->cache().stats().sequences, 0);
  EXPECT_TRUE(world.engine->cache().verify().ok());
}

TEST(Generate, AReaderThatThrowsIsHeardAndLeavesNothingBehind) {
  World world(options_with_context(256));
  const auto prompt = random_tokens(20, world.vocab_size(), 12);
  const auto reader = [](std::string_view) -> bool { throw std::runtime_error("the reader's own"); };
  EXPECT_THROW(static_cast<void>(world.engine->generate(greedy(prompt, 8), reader)), std::runtime_error);
  EXPECT_EQ(world.engine->cache().stats().sequences, 0);
  EXPECT_TRUE(world.engine->generate(greedy(prompt, 8)).ok());
}

TEST(Generate, SaysWhatItHeldAtItsEnd) {
  World world(options_with_context(256));
  auto result = world.engine->generate(greedy(random_tokens(40, world.vocab_size(), 5), 8));
  ASSERT_TRUE(result.ok());
  // The last token drawn is not fed to the model, whether it ends the answer or is its last.
  const int64_t fed = result->tokens_out - (result->finish_reason == FinishReason::kLength ? 1 : 0);
  EXPECT_EQ(result->blocks_held, blocks_for(Tokens(40 + fed), Tokens(16)));
  EXPECT_EQ(result->bytes_held, world.engine->cache().image_bytes(0) * result->blocks_held.n);
  EXPECT_GT(result->prefill_seconds, 0);
  EXPECT_GT(result->decode_seconds, 0);
}

TEST(Generate, StopsAtAStopStringAndDoesNotShowIt) {
  World world(options_with_context(256));
  const auto prompt = random_tokens(30, world.vocab_size(), 11);
  auto whole = world.engine->generate(greedy(prompt, 24));
  ASSERT_TRUE(whole.ok());
  ASSERT_GE(whole->text.size(), 4u);
  GenerateRequest request = greedy(prompt, 24);
  const size_t at = whole->text.size() / 2;
  request.stop = {whole->text.substr(at, 2)};
  std::string streamed;
  auto stopped = world.engine->generate(request, [&](std::string_view text) {
    streamed += text;
    return true;
  });
  ASSERT_TRUE(stopped.ok());
  EXPECT_EQ(stopped->finish_reason, FinishReason::kStop);
  EXPECT_EQ(stopped->text, whole->text.substr(0, whole->text.find(request.stop[0])));
  EXPECT_EQ(streamed, stopped->text);
}

TEST(Generate, RefusesBadRequestsAndChangesNothing) {
  World world(options_with_context(64));
  auto code = [&](const GenerateRequest& request) { return world.engine->generate(request).status().code(); };
  EXPECT_EQ(code(greedy({}, 4)), Code::kInvalidArgument);
  EXPECT_EQ(code(greedy(random_tokens(64, 320, 1), 4)), Code::kInvalidArgument);
  EXPECT_EQ(code(greedy({5, 320}, 4)), Code::kInvalidArgument);
  EXPECT_EQ(code(greedy({5, -1}, 4)), Code::kInvalidArgument);
  GenerateRequest odd = greedy({5, 6}, 4);
  odd.sampling.top_p = 7;
  EXPECT_EQ(code(odd), Code::kInvalidArgument);
  EXPECT_EQ(world.engine->cache().stats().sequences, 0);
}

}  // namespace
}  // namespace pagedkv::engine
