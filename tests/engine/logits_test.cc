// The engine's logits against libllama's, on tiny random models in float32.
//
// Tolerance: 1e-3 of the standard deviation of each row of logits. Both sides sum the same products in float32 in
// different orders, which gives about 1e-5; a wrong position, mask, head or rotation gives 1e-1 and more.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/engine/files.h"
#include "tests/engine/oracle.h"
#include "tests/engine/world.h"

namespace pagedkv::engine {
namespace {

constexpr double kTolerance = 1e-3;

// Two threads where their number is the point; ggml's threads spin, which is slow on a busy machine.
EngineOptions f32_options(const std::string& name, int threads = 1) {
  return {.model_path = tiny_model(name),
          .threads = threads,
          .kv_formats = {.k = Format::kF32, .v = Format::kF32},
          .num_blocks = Blocks(64),
          .kv_memory = Bytes(256 << 20)};
}

class Logits : public testing::TestWithParam<const char*> {};

TEST_P(Logits, EqualThoseOfLibllamaInOneChunkInSingleTokensAndInOddChunks) {
  World world(f32_options(GetParam()));
  Oracle oracle(tiny_model(GetParam()), {.context = 256});
  const auto tokens = random_tokens(150, world.vocab_size(), 1);
  const auto expected = oracle.logits(tokens);
  for (const std::vector<int>& chunks : {std::vector{150}, {1}, {3, 7, 1, 31, 16, 5, 64, 2, 9}}) {
    const auto found = world.logits(tokens, chunks);
    EXPECT_LE(worst_error(found, expected, world.vocab_size()), kTolerance) << "first chunk " << chunks[0];
  }
}

TEST_P(Logits, OfSeveralSequencesInOneStepAreThoseOfEachAlone) {
  World world(f32_options(GetParam(), 2));
  Oracle oracle(tiny_model(GetParam()), {.context = 256});
  // Three streams of different lengths take uneven bites, some of them none, until all are through.
  struct Stream {
    std::vector<int32_t> tokens;
    SequenceId id;
    size_t at = 0;
    std::vector<float> logits;
  };
  std::vector<Stream> streams;
  for (int n : {90, 41, 17}) {
    auto tokens = random_tokens(n, world.vocab_size(), uint32_t(n));
    const SequenceId id = world.start(tokens).id;
    streams.push_back({.tokens = std::move(tokens), .id = id, .at = 0, .logits = {}});
  }
  for (size_t turn = 0; turn < 200; ++turn) {
    std::vector<StepInput> inputs;
    std::vector<Stream*> fed;
    for (size_t i = 0; i < streams.size(); ++i) {
      Stream& s = streams[i];
      const size_t n = std::min((turn * (i + 3) + i) % 13, s.tokens.size() - s.at);
      if (n == 0) continue;
      inputs.push_back({.sequence = s.id, .tokens = std::span(s.tokens).subspan(s.at, n), .all_logits = true});
      fed.push_back(&s);
      s.at += n;
    }
    if (inputs.empty()) continue;
    auto out = world.engine->step(inputs);
    ASSERT_TRUE(out.ok()) << out.status().message();
    const auto width = size_t(world.vocab_size());
    for (size_t i = 0; i < fed.size(); ++i) {
      const auto rows = out->logits.subspan(size_t(out->first_row[i]) * width, inputs[i].tokens.size() * width);
      fed[i]->logits.insert(fed[i]->logits.end(), rows.begin(), rows.end());
    }
  }
  for (const Stream& s : streams) {
    ASSERT_EQ(s.at, s.tokens.size());
    EXPECT_LE(worst_error(s.logits, oracle.logits(s.tokens), world.vocab_size()), kTolerance);
  }
}

TEST_P(Logits, AfterAPrefixHitAreThoseOfAColdStart) {
  World world(f32_options(GetParam()));
  const auto tokens = random_tokens(100, world.vocab_size(), 7);
  const auto cold = world.logits(tokens, {100});
  // A first conversation leaves its full blocks; the second shares 70 tokens of it and goes on differently.
  const auto prefix = std::span(tokens).first(70);
  auto other = std::vector<int32_t>(prefix.begin(), prefix.end());
  const auto tail = random_tokens(20, world.vocab_size(), 8);
  other.insert(other.end(), tail.begin(), tail.end());
  const Started first = world.start(other);
  EXPECT_EQ(first.reused, Tokens(0));
  world.feed(first.id, other, {33, 8});
  ASSERT_TRUE(world.engine->cache().release(first.id).ok());

  const Started second = world.start(tokens);
  EXPECT_GE(second.reused, Tokens(64));
  const auto reused = size_t(second.reused.n);
  const auto warm = world.feed(second.id, std::span(tokens).subspan(reused), {11, 4});
  const auto expected = std::span(cold).subspan(reused * size_t(world.vocab_size()));
  EXPECT_LE(worst_error(warm, expected, world.vocab_size()), kTolerance);
  EXPECT_TRUE(world.engine->cache().verify().ok());
}

INSTANTIATE_TEST_SUITE_P(Tiny, Logits, testing::ValuesIn(kTinyModels),
                         [](const auto& info) { return std::string(info.param); });

TEST(Step, GivesTheLastRowOfEachInputUnlessAllAreAsked) {
  World world(f32_options("d64_gqa3_tied"));
  const auto tokens = random_tokens(12, world.vocab_size(), 3);
  const auto all = world.logits(tokens, {12});
  const SequenceId a = world.start(tokens).id, b = world.start(tokens).id;
  const StepInput inputs[] = {{.sequence = a, .tokens = tokens},
                              {.sequence = b, .tokens = tokens, .all_logits = true}};
  auto out = world.engine->step(inputs);
  ASSERT_TRUE(out.ok()) << out.status().message();
  EXPECT_EQ(out->first_row, (std::vector<int64_t>{0, 1}));
  const auto width = size_t(world.vocab_size());
  ASSERT_EQ(out->logits.size(), 13 * width);
  EXPECT_LE(worst_error(out->logits.first(width), std::span(all).last(width), world.vocab_size()), kTolerance);
  EXPECT_LE(worst_error(out->logits.subspan(width), all, world.vocab_size()), kTolerance);
}

TEST(Step, RefusesWhatGgmlWouldAbortOn) {
  World world(f32_options("d64_gqa3_tied"));
  const SequenceId id = world.start(std::vector<int32_t>{5}).id;
  for (int32_t token : {-1, int32_t(world.vocab_size()), INT32_MAX, INT32_MIN}) {
    const StepInput input{.sequence = id, .tokens = {&token, 1}};
    auto out = world.engine->step({&input, 1});
    ASSERT_FALSE(out.ok());
    EXPECT_EQ(out.status().code(), Code::kInvalidArgument);
    EXPECT_NE(out.status().message().find(std::to_string(token)), std::string::npos) << out.status().message();
  }
  const StepInput empty{.sequence = id, .tokens = {}};
  EXPECT_EQ(world.engine->step({&empty, 1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(world.engine->step({}).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace pagedkv::engine
