// A real model with sliding windows over four times the window of text. What the bounds mean: smollm2_test.cc.
//
// Seen on AVX-512: 11.8899 against libllama's 11.9157 and 11.8645 with its flash kernel, 96.44 % and 96.53 % of the
// best tokens. With the weights dequantized to f32: 11.8684, 11.8683 and 11.8686, 99.90 % and 99.90 %.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/engine/files.h"
#include "tests/engine/oracle.h"
#include "tests/engine/quality.h"
#include "tests/engine/world.h"

namespace pagedkv::engine {
namespace {

constexpr const char* kNoModel = "no Gemma 3 270M: set PAGEDKV_TEST_GEMMA3, or run tools/model gemma3";

TEST(Gemma3, PredictsWikiTextAsWellAsLibllamaAcrossItsWindow) {
  const std::string model = gemma3(), text = test_text();
  if (model.empty()) GTEST_SKIP() << kNoModel;
  if (text.empty()) GTEST_SKIP() << "no text: set PAGEDKV_TEST_TEXT to a plain text file of 10 KB or more";
  // 262,144 logits a token: 128 tokens of them take 134 MB, and so do libllama's.
  expect_to_predict_as_well_as_libllama(model, text, 128);
}

TEST(Gemma3, HoldsAWindowOfBlocksInFifteenOfItsEighteenLayers) {
  const std::string model = gemma3();
  if (model.empty()) GTEST_SKIP() << kNoModel;
  World world({.model_path = model, .context = Tokens(2048), .threads = 1});
  ASSERT_EQ(world.engine->model().groups.size(), 2u);
  EXPECT_EQ(world.engine->model().groups[0].layers, (std::vector<int>{5, 11, 17}));
  EXPECT_EQ(world.engine->model().groups[1].layers.size(), 15u);
  EXPECT_EQ(world.engine->model().groups[1].sliding_window, 512);
  Cache& cache = world.engine->cache();
  const auto tokens = random_tokens(704, world.vocab_size(), 1);
  const SequenceId id = world.start(tokens).id;
  for (size_t at = 0; at < tokens.size(); at += 64) {
    const StepInput input{.sequence = id, .tokens = std::span(tokens).subspan(at, 64)};
    ASSERT_TRUE(world.engine->step({&input, 1}).ok());
    EXPECT_LE(cache.blocks_held(id, 1)->n, 512 / 16 + 1);
  }
  EXPECT_EQ(cache.blocks_held(id, 0)->n, 704 / 16);
  EXPECT_TRUE(cache.verify().ok());
}

TEST(Gemma3, ContinuesAPromptAsLibllamaDoes) {
  const std::string model = gemma3();
  if (model.empty()) GTEST_SKIP() << kNoModel;
  const std::string words = "The capital of France is";
  World world({.model_path = model, .context = Tokens(256), .threads = 1});
  auto prompt = world.engine->text().tokenize(words, true, false);
  ASSERT_TRUE(prompt.ok());
  GenerateRequest request{.prompt = *prompt, .max_tokens = Tokens(8), .sampling = {}, .stop = {}};
  request.sampling.temperature = 0;
  auto result = world.engine->generate(request);
  ASSERT_TRUE(result.ok()) << result.status().message();

  Oracle oracle(model, {.context = 256, .flash = false, .f16_kv = true});
  std::vector<int32_t> tokens = oracle.tokenize(words);
  EXPECT_EQ(tokens, *prompt);
  std::string expected;
  for (int i = 0; i < 8; ++i) {
    const auto logits = oracle.logits(tokens);
    const auto next = argmax(std::span(logits).last(size_t(oracle.vocab_size())));
    tokens.push_back(int32_t(next));
    expected += world.engine->text().piece(tokens.back());
  }
  EXPECT_EQ(result->text, expected);
}

}  // namespace
}  // namespace pagedkv::engine
