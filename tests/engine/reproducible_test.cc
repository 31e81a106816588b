// With `reproducible`, whole logits are equal to the bit: cold, after a hit, chunked, batched, forked.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/engine/files.h"
#include "tests/engine/world.h"

namespace pagedkv::engine {
namespace {

// Rows that differ in any bit.
int64_t rows_that_differ(std::span<const float> a, std::span<const float> b, int64_t width) {
  if (a.size() != b.size()) return -1;
  int64_t n = 0;
  for (size_t at = 0; at < a.size(); at += size_t(width))
    n += std::memcmp(a.data() + at, b.data() + at, size_t(width) * sizeof(float)) != 0;
  return n;
}

void expect_equal_bits(const EngineOptions& options, int n_tokens) {
  World world(options);
  const int64_t width = world.vocab_size();
  const auto tokens = random_tokens(n_tokens, width, 11);
  const auto cold = world.logits(tokens, {n_tokens});
  for (const std::vector<int>& chunks : {std::vector{1}, {2}, {3, 7, 1, 16, 5}, {8}, {n_tokens / 2, 1}})
    EXPECT_EQ(rows_that_differ(world.logits(tokens, chunks), cold, width), 0) << "chunks from " << chunks[0];

  // A hit: a first conversation leaves its blocks, the second takes them.
  const Started first = world.start(tokens);
  world.feed(first.id, tokens, {13});
  ASSERT_TRUE(world.engine->cache().release(first.id).ok());
  const Started second = world.start(tokens);
  EXPECT_GT(second.reused.n, 0);
  const auto skipped = size_t(second.reused.n * width);
  const auto warm = world.feed(second.id, std::span(tokens).subspan(size_t(second.reused.n)), {4});
  EXPECT_EQ(rows_that_differ(warm, std::span(cold).subspan(skipped), width), 0) << "after a hit";

  // A fork of all but the last token, stepped in a batch with its parent and a stranger.
  ASSERT_TRUE(world.engine->cache().truncate(second.id, Tokens(n_tokens - 1)).ok());
  auto fork = world.engine->cache().fork(second.id);
  ASSERT_TRUE(fork.ok());
  const auto stranger_tokens = random_tokens(9, width, 12);
  const SequenceId stranger = world.start(stranger_tokens).id;
  const auto last = std::span(tokens).last(1);
  const StepInput inputs[] = {{.sequence = stranger, .tokens = stranger_tokens},
                              {.sequence = *fork, .tokens = last},
                              {.sequence = second.id, .tokens = last}};
  auto out = world.engine->step(inputs);
  ASSERT_TRUE(out.ok()) << out.status().message();
  for (const int input : {1, 2}) {
    const auto row = out->logits.subspan(size_t(out->first_row[size_t(input)] * width), size_t(width));
    EXPECT_EQ(rows_that_differ(row, std::span(cold).last(size_t(width)), width), 0) << "input " << input;
  }
}

class Reproducible : public testing::TestWithParam<const char*> {};

TEST_P(Reproducible, LogitsAreEqualToTheBitOnTinyModels) {
  for (const Format format : {Format::kF16, Format::kQ8, Format::kQ4})
    expect_equal_bits({.model_path = tiny_model(GetParam()),
                       .threads = 1,
                       .kv_formats = {.k = format, .v = format},
                       .num_blocks = Blocks(64),
                       .kv_memory = Bytes(256 << 20),
                       .reproducible = true},
                      60);
}

INSTANTIATE_TEST_SUITE_P(Tiny, Reproducible, testing::ValuesIn(kTinyModels),
                         [](const auto& info) { return std::string(info.param); });

TEST(ReproducibleModel, SmolLM2) {
  const std::string model = smollm2();
  if (model.empty()) GTEST_SKIP() << "no SmolLM2 model: set PAGEDKV_TEST_MODEL, or run tools/model smollm2";
  expect_equal_bits(
      {.model_path = model, .threads = 1, .kv_formats = {.k = Format::kQ8, .v = Format::kQ8}, .reproducible = true},
      70);
}

// 262,144 logits a token keep this one short; the tiny models go past their windows.
TEST(ReproducibleModel, Gemma3) {
  const std::string model = gemma3();
  if (model.empty()) GTEST_SKIP() << "no Gemma 3 270M: set PAGEDKV_TEST_GEMMA3, or run tools/model gemma3";
  expect_equal_bits({.model_path = model, .context = Tokens(256), .threads = 1, .reproducible = true}, 40);
}

}  // namespace
}  // namespace pagedkv::engine
