// Sliding windows: what is given back behind them, and what may still be done at their edge. Tiny random models.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/gguf_file.h"
#include "tests/engine/files.h"
#include "tests/engine/oracle.h"
#include "tests/engine/world.h"

namespace pagedkv::engine {
namespace {

constexpr double kTolerance = 1e-3;               // see logits_test.cc
constexpr const char* kModel = "gemma3_window8";  // 7 layers, the sixth sees all
constexpr int kWindowed = 1;                      // the group's index: full attention comes first

EngineOptions options_for(const std::string& path, int64_t block_size = 4) {
  return {.model_path = path,
          .threads = 1,
          .kv_formats = {.k = Format::kF32, .v = Format::kF32},
          .block_size = Tokens(block_size),
          .num_blocks = Blocks(128),
          .kv_memory = Bytes(256 << 20)};
}

std::vector<int32_t> joined(std::span<const int32_t> a, std::span<const int32_t> b) {
  std::vector<int32_t> out(a.begin(), a.end());
  out.insert(out.end(), b.begin(), b.end());
  return out;
}

TEST(Window, LayersAreGroupedByWhatTheySee) {
  const struct {
    const char* model;
    std::vector<int64_t> windows;
    std::vector<std::vector<int>> layers;
  } cases[] = {
      {"gemma3_window8", {0, 8}, {{5}, {0, 1, 2, 3, 4, 6}}},
      {"gemma3_window16_pattern3", {0, 16}, {{2}, {0, 1, 3}}},
      {"gemma3_window11_listed", {0, 11}, {{1}, {0, 2}}},
      {"gemma3_window40_all", {40}, {{0, 1}}},
      {"gemma3_no_window", {0}, {{0, 1}}},
  };
  for (const auto& c : cases) {
    auto info = read_model_info(tiny_model(c.model));
    ASSERT_TRUE(info.ok()) << info.status().message();
    ASSERT_EQ(info->groups.size(), c.windows.size()) << c.model;
    for (size_t g = 0; g < c.windows.size(); ++g) {
      EXPECT_EQ(info->groups[g].sliding_window, c.windows[g]) << c.model;
      EXPECT_EQ(info->groups[g].layers, c.layers[g]) << c.model;
    }
  }
}

TEST(Window, BlocksBehindItAreGivenBackWhileDecodingGoesOn) {
  World world(options_for(tiny_model(kModel)));
  Cache& cache = world.engine->cache();
  const auto tokens = random_tokens(300, world.vocab_size(), 2);
  const SequenceId id = world.start(tokens).id;
  world.feed(id, std::span(tokens).first(20), {20});
  // The next query sees itself and 7 before: at most 3 blocks of 4.
  for (size_t at = 20; at < tokens.size(); ++at) {
    const StepInput input{.sequence = id, .tokens = std::span(tokens).subspan(at, 1)};
    ASSERT_TRUE(world.engine->step({&input, 1}).ok());
    ASSERT_LE(cache.blocks_held(id, kWindowed)->n, 3) << "after token " << at;
  }
  EXPECT_EQ(cache.blocks_held(id, 0)->n, 300 / 4);
  EXPECT_TRUE(cache.verify().ok());
  EXPECT_TRUE(cache.release(id).ok());
}

TEST(Window, TruncateAtItsEdgeKeepsTheLogitsOrIsRefusedAndChangesNothing) {
  for (int64_t block_size : {4, 16}) {
    World world(options_for(tiny_model(kModel), block_size));
    Cache& cache = world.engine->cache();
    const auto tokens = random_tokens(100, world.vocab_size(), 3), tail = random_tokens(24, world.vocab_size(), 4);
    const auto width = size_t(world.vocab_size());
    const SequenceId first = world.start(tokens).id;
    world.feed(first, tokens, {37, 8});
    // The token at 100 sees 93 and later: the block of 93 is the first that is still held.
    const int64_t first_held = 93 / block_size * block_size;
    for (int64_t length : {100, 99, 98, 93, 92, 88, 87, 86, 80, 50, 8, 7, 1}) {
      auto fork = cache.fork(first);
      ASSERT_TRUE(fork.ok());
      const Status s = cache.truncate(*fork, Tokens(length));
      EXPECT_EQ(s.ok(), length - 7 >= first_held) << "truncated to " << length << ": " << s.message();
      if (!s.ok()) {
        EXPECT_EQ(s.code(), Code::kInvalidArgument);
        EXPECT_EQ(cache.length(*fork)->n, 100);
      }
      const size_t now = s.ok() ? size_t(length) : 100;
      const auto whole = joined(std::span(tokens).first(now), tail);
      const auto found = world.feed(*fork, tail, {1, 5, 9});
      const auto fresh = world.logits(whole, {int(whole.size())});
      EXPECT_LE(worst_error(found, std::span(fresh).subspan(now * width), world.vocab_size()), kTolerance)
          << "truncated to " << length << (s.ok() ? "" : ", refused");
      ASSERT_TRUE(cache.verify().ok()) << cache.verify().message();
      ASSERT_TRUE(cache.release(*fork).ok());
    }
  }
}

TEST(Window, ForksGoTheirOwnWayAcrossIt) {
  World world(options_for(tiny_model(kModel)));
  Cache& cache = world.engine->cache();
  const auto tokens = random_tokens(61, world.vocab_size(), 5);
  const auto width = size_t(world.vocab_size());
  const SequenceId first = world.start(tokens).id;
  world.feed(first, tokens, {20});
  const SequenceId second = *cache.fork(first);
  for (SequenceId id : {first, second}) {
    const auto tail = random_tokens(30, world.vocab_size(), id == first ? 6 : 7);
    const auto found = world.feed(id, tail, {1, 1, 1, 6});
    const auto whole = joined(tokens, tail);
    const auto fresh = world.logits(whole, {int(whole.size())});
    EXPECT_LE(worst_error(found, std::span(fresh).subspan(61 * width), world.vocab_size()), kTolerance);
    EXPECT_TRUE(cache.verify().ok());
  }
}

TEST(Window, APromptIsFoundAgainAfterItsRelease) {
  World world(options_for(tiny_model(kModel)));
  GenerateRequest request{
      .prompt = random_tokens(90, world.vocab_size(), 8), .max_tokens = Tokens(30), .sampling = {}, .stop = {}};
  request.sampling.temperature = 0;
  auto first = world.engine->generate(request);
  auto second = world.engine->generate(request);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->tokens_reused, 0);
  EXPECT_GE(second->tokens_reused, 80);
  EXPECT_EQ(first->text, second->text);
  EXPECT_TRUE(world.engine->cache().verify().ok());
}

// --- softcaps -------------------------------------------------------------------------------------------------

TEST(Gemma3File, AttentionSoftcapIsAppliedWhereItIsSet) {
  const char* name = "gemma3_window16_pattern3";  // has the key, with 0
  const auto logits_with = [&](float cap) {
    Contents file = read_file(tiny_model(name));
    set_key(file, "gemma3.attn_logit_softcapping", cap);
    const TemporaryFile changed(file);
    World world(options_for(changed.path()));
    return world.logits(random_tokens(40, world.vocab_size(), 9), {40});
  };
  const auto off = logits_with(0);
  EXPECT_LE(worst_error(logits_with(1e6f), off, 320), kTolerance);
  EXPECT_GT(worst_error(logits_with(0.5f), off, 320), 0.01);
}

// --- refusals -------------------------------------------------------------------------------------------------

template <class T>
Status with_key(const char* model, std::string_view key, T value) {
  Contents file = read_file(tiny_model(model));
  set_key(file, key, value);
  const TemporaryFile changed(file);
  return read_model_info(changed.path()).status();
}

void expect_refused(const Status& s, Code code, std::string_view part) {
  EXPECT_EQ(s.code(), code) << s.message();
  EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
}

TEST(Families, RefuseHeadsThatLibllamaRefuses) {
  expect_refused(with_key<uint32_t>("qwen2_d64_gqa7_tied", "qwen2.attention.value_length", 32), Code::kUnsupported,
                 "'qwen2.attention.value_length' is 32");
  expect_refused(with_key<uint32_t>("qwen3_d128_gqa2", "qwen3.attention.value_length", 64), Code::kUnsupported,
                 "'qwen3.attention.value_length' is 64");
  expect_refused(with_key<uint32_t>(kModel, "gemma3.attention.value_length", 32), Code::kUnsupported,
                 "'gemma3.attention.value_length' is 32");
  expect_refused(with_key<uint32_t>("qwen3_d128_gqa2", "qwen3.rope.dimension_count", 64), Code::kUnsupported,
                 "'qwen3.rope.dimension_count' is 64");
}

TEST(Families, RefuseWindowsAndSoftcapsOutOfRange) {
  expect_refused(with_key<uint32_t>(kModel, "gemma3.attention.sliding_window", 4294967295u), Code::kCorrupt,
                 "'gemma3.attention.sliding_window' is 4294967295");
  for (float cap : {-1.0f, 1e30f}) {
    expect_refused(with_key("gemma3_window16_pattern3", "gemma3.final_logit_softcapping", cap), Code::kCorrupt,
                   "'gemma3.final_logit_softcapping'");
  }
  expect_refused(with_key("gemma3_window16_pattern3", "gemma3.rope.freq_base_swa", 0.0f), Code::kCorrupt,
                 "'gemma3.rope.freq_base_swa'");
  // The list's length stands behind its key, the array's type and that of its elements.
  constexpr std::string_view kList = "gemma3.attention.sliding_window_pattern";
  Contents file = read_file(tiny_model("gemma3_window11_listed"));
  overwrite<uint32_t>(file, find_in(file, kList) + kList.size() + 4, uint32_t(GgufType::kI8));
  const TemporaryFile changed(file);
  expect_refused(read_model_info(changed.path()).status(), Code::kCorrupt, "array of bool, u32 or i32");
}

}  // namespace
}  // namespace pagedkv::engine
