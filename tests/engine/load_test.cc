// What a model's header claims is checked key by key and tensor by tensor, and limits that do not fit are reported.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "engine/gguf_file.h"
#include "engine/model.h"
#include "engine/text.h"
#include "pagedkv/log.h"
#include "tests/engine/files.h"

namespace pagedkv::engine {
namespace {

constexpr const char* kModel = "d64_gqa3_tied";  // 3 heads over 1, 2 layers, n_embd 192, n_ff 160, vocabulary 320

Status status_of(const Contents& contents) {
  const TemporaryFile file(contents);
  return read_model_info(file.path()).status();
}

void expect_refused(const Contents& contents, Code code, std::initializer_list<std::string_view> parts) {
  const Status s = status_of(contents);
  EXPECT_EQ(s.code(), code) << s.message();
  for (std::string_view part : parts) {
    EXPECT_NE(s.message().find(part), std::string::npos) << "'" << part << "' is not in: " << s.message();
  }
}

template <class T>
Contents with_key(std::string_view key, T value, const char* model = kModel) {
  Contents file = read_file(tiny_model(model));
  set_key(file, key, value);
  return file;
}

// Replaces every occurrence by other letters of the same number, which leaves the file's layout as it is.
Contents with_letters(std::string_view from, std::string_view to, const char* model = kModel) {
  Contents file = read_file(tiny_model(model));
  for (size_t at; (at = find_in(file, from)) != std::string_view::npos;) {
    std::memcpy(file.data() + at, to.data(), to.size());
  }
  return file;
}

TEST(ModelInfo, TellsWhatTheHeaderSays) {
  auto info = read_model_info(tiny_model(kModel));
  ASSERT_TRUE(info.ok()) << info.status().message();
  EXPECT_EQ(info->architecture, "llama");
  EXPECT_EQ(info->name, kModel);
  EXPECT_EQ(info->n_layers, 2);
  EXPECT_EQ(info->n_embd, 192);
  EXPECT_EQ(info->vocab_size, 320);
  EXPECT_EQ(info->context_length, 512);
  ASSERT_EQ(info->groups.size(), 1u);
  const GroupSpec& group = info->groups[0];
  EXPECT_EQ(group.shape.num_kv_heads, 1);
  EXPECT_EQ(info->n_head, 3);
  EXPECT_EQ(group.shape.head_dim_k, 64);
  EXPECT_EQ(group.shape.head_dim_v, 64);
  EXPECT_EQ(group.sliding_window, 0);
  EXPECT_EQ(group.layers, (std::vector<int>{0, 1}));
}

TEST(ModelInfo, GivesEqualFingerprintsToEqualFilesAndOthersToOtherWeights) {
  const Contents original = read_file(tiny_model(kModel));
  const TemporaryFile copy(original);
  const auto fingerprint = [](const std::string& path) { return read_model_info(path)->fingerprint; };
  EXPECT_EQ(fingerprint(copy.path()), fingerprint(tiny_model(kModel)));
  Contents other = original;
  auto file = *GgufFile::parse(original, "original");
  const GgufTensor& last = file->tensors().back();
  other[size_t(last.offset + last.n_bytes - 1)] ^= std::byte{1};
  const TemporaryFile changed(other);
  EXPECT_NE(fingerprint(changed.path()), fingerprint(copy.path()));
  // The rotary setting is part of it.
  const TemporaryFile rotated(with_key("llama.rope.freq_base", 20000.0f));
  EXPECT_NE(fingerprint(rotated.path()), fingerprint(copy.path()));
}

TEST(Load, RefusesAbsurdHyperParametersNamingKeyAndValue) {  // O-LOAD-02
  const struct {
    std::string_view key;
    uint32_t value;
  } cases[] = {
      {"llama.attention.head_count", 0},
      {"llama.attention.head_count_kv", 0},
      {"llama.block_count", 4294967295u},
      {"llama.block_count", 0},
      {"llama.block_count", 3},
      {"llama.block_count", 1},
      {"llama.attention.head_count_kv", 4},
      {"llama.attention.head_count_kv", 2},
      {"llama.context_length", 0},
      {"llama.context_length", 4294967295u},
      {"llama.embedding_length", 0},
      {"llama.embedding_length", 4294967295u},
      {"llama.feed_forward_length", 0},
      {"llama.rope.dimension_count", 63},
      {"llama.rope.dimension_count", 0},
      {"llama.rope.dimension_count", 128},
      {"llama.attention.key_length", 0},
      {"llama.attention.key_length", 100000},
      {"llama.attention.value_length", 0},
      {"llama.attention.head_count", 4294967295u},
  };
  for (const auto& c : cases) {
    // "head_count" is also the beginning of "head_count_kv": the shorter key comes first in the file.
    expect_refused(with_key(c.key, c.value), Code::kCorrupt,
                   {"'" + std::string(c.key) + "'", std::to_string(c.value)});
  }
  const float infinite = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (float value : {0.0f, -1.0f, infinite, nan}) {
    expect_refused(with_key("llama.rope.freq_base", value), Code::kCorrupt, {"'llama.rope.freq_base'"});
    expect_refused(with_key("llama.attention.layer_norm_rms_epsilon", value), Code::kCorrupt,
                   {"'llama.attention.layer_norm_rms_epsilon'"});
  }
  for (float value : {-1.0f, infinite, nan, 1e30f}) {
    expect_refused(with_key("llama.rope.scaling.factor", value, "d64_gqa4_yarn"), Code::kCorrupt,
                   {"'llama.rope.scaling.factor'"});
  }
}

TEST(Load, RefusesMissingKeysNamingThem) {
  for (std::string_view key : {"llama.context_length", "llama.embedding_length", "llama.block_count",
                               "llama.feed_forward_length", "llama.attention.layer_norm_rms_epsilon"}) {
    std::string other(key);
    other.back() = '_';
    expect_refused(with_letters(key, other), Code::kCorrupt, {"'" + std::string(key) + "'", "missing"});
  }
  expect_refused(with_letters("tokenizer.ggml.tokens", "tokenizer.ggml.tokenz"), Code::kCorrupt,
                 {"tokenizer.ggml.tokens", "missing"});
}

TEST(Load, RefusesMissingMisshapenAndUnknownTensorsNamingThem) {
  expect_refused(with_letters("blk.1.ffn_up.weight", "blk.1.ffn_uq.weight"), Code::kUnsupported,
                 {"blk.1.ffn_uq.weight", "[192, 160]"});
  expect_refused(with_letters("blk.1.attn_v.weight", "blk.1.attn_v.bias__"), Code::kUnsupported,
                 {"blk.1.attn_v.bias__"});
  {
    Contents file = read_file(tiny_model(kModel));
    const TensorEntry up = entry_of(file, "blk.0.ffn_up.weight");
    overwrite<int64_t>(file, up.ne(0), 160);
    overwrite<int64_t>(file, up.ne(1), 192);
    expect_refused(file, Code::kCorrupt, {"blk.0.ffn_up.weight", "[160, 192]", "[192, 160]"});
  }
  {
    Contents file = read_file(tiny_model(kModel));
    const TensorEntry v = entry_of(file, "blk.0.attn_v.weight");  // as many bytes in i32, but no weights
    overwrite<uint32_t>(file, v.type(), GGML_TYPE_I32);
    expect_refused(file, Code::kUnsupported, {"blk.0.attn_v.weight", "i32"});
  }
  {
    Contents file = read_file(tiny_model("d64_gqa7_llama3"));
    const TensorEntry factors = entry_of(file, "rope_freqs.weight");
    overwrite<int64_t>(file, factors.ne(0), 16);
    expect_refused(file, Code::kCorrupt, {"rope_freqs.weight", "[16]", "[32]"});
  }
}

TEST(Load, RefusesOtherKindsOfModelsAndSaysWhatWorks) {
  expect_refused(with_letters("llama", "qwenX"), Code::kUnsupported, {"'qwenX'", "llama"});
  expect_refused(with_letters("model", "lorax"), Code::kUnsupported, {"general.type", "'lorax'", "llama"});
  expect_refused(with_letters("linear", "longro", "d128_gqa4_linear"), Code::kUnsupported,
                 {"longro", "none, linear, yarn"});
  expect_refused(with_key<uint32_t>("llama.expert_count", 8), Code::kUnsupported,
                 {"experts", "llama.expert_count"});
}

TEST(Load, RefusesVocabulariesOnWhichLibllamaAborts) {
  expect_refused(with_letters("<0x41>", "<0x42>"), Code::kCorrupt, {"tokenizer.ggml.tokens", "the same"});
  // libllama reads tokens up to a zero byte.
  expect_refused(with_letters("<0x41>", std::string_view("w5\0\0\0\0", 6)), Code::kCorrupt, {"the same"});
  expect_refused(with_key<uint32_t>("tokenizer.ggml.bos_token_id", 320), Code::kCorrupt,
                 {"tokenizer.ggml.bos_token_id", "320"});
  expect_refused(with_letters("tokenizer.ggml.model", "tokenizer.ggml.nodel"), Code::kCorrupt,
                 {"tokenizer.ggml.model", "missing"});
}

TEST(Load, SurvivesAnyDamageToAHeader) {
  for (const char* name : {kModel, "gemma3_window11_listed"}) {
    const Contents whole = read_file(tiny_model(name));
    const auto header = uint32_t((*GgufFile::parse(whole, "whole"))->data_offset());
    uint32_t state = 12345;
    const auto random = [&state](uint32_t below) {
      state = state * 1664525u + 1013904223u;
      return (state >> 8) % below;
    };
    for (int round = 0; round < 1000; ++round) {
      Contents damaged = whole;
      for (uint32_t i = 0, n = 1 + random(3); i < n; ++i) {
        const uint32_t values[] = {0, 0xff, 0x80, 1, random(256)};
        damaged[random(header)] = static_cast<std::byte>(values[random(5)]);
      }
      const TemporaryFile file(damaged);
      // What passes goes to libllama, which must not abort on it either.
      if (auto model = Model::load(file.path()); model.ok()) {
        static_cast<void>(Text::load(file.path()));
      } else {
        EXPECT_FALSE(model.status().message().empty());
      }
    }
  }
}

// --- limits ---------------------------------------------------------------------------------------------------

// Collects the library's notices while it lives.
class Notices {
 public:
  Notices() {
    set_log_sink([this](std::string_view message) { text += std::string(message) + "\n"; });
  }
  ~Notices() { set_log_sink({}); }
  std::string text;
};

TEST(Load, ChoosesAContextThatFitsAndReportsIt) {  // O-MEM-06
  Notices notices;
  auto engine = Engine::load({.model_path = tiny_model("d64_long_context"),
                              .threads = 1,
                              .num_blocks = Blocks(16),
                              .kv_memory = Bytes(8 << 20)});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  // One token: 2 layers of K and V, one head of 64, f16.
  EXPECT_LE((*engine)->context().n, (8 << 20) / (2 * 2 * 64 * 2));
  EXPECT_GE((*engine)->context().n, 1024);
  EXPECT_EQ((*engine)->model().context_length, 1048576);
  EXPECT_NE(notices.text.find("context is " + std::to_string((*engine)->context().n) + " tokens"),
            std::string::npos)
      << notices.text;
}

TEST(Load, RefusesAnExplicitContextThatDoesNotFit) {
  auto engine = Engine::load({.model_path = tiny_model("d64_long_context"),
                              .context = Tokens(1000000),
                              .threads = 1,
                              .num_blocks = Blocks(16),
                              .kv_memory = Bytes(8 << 20)});
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.status().code(), Code::kCapacity);
  for (const char* part : {"1000000 tokens needs 489 MiB of K and V, kv_memory of 8 MiB holds 16384 tokens",
                           "--context", "--kv-memory", "--kv-quant"})
    EXPECT_NE(engine.status().message().find(part), std::string::npos) << engine.status().message();
  EXPECT_EQ(engine.status().message().find("--num-blocks"), std::string::npos);
}

TEST(Load, AContextThatIsAcceptedCanBeFilledInEitherArena) {
  for (const ArenaOrder arena : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor}) {
    EngineOptions options{.model_path = tiny_model("d64_long_context"),
                          .context = Tokens(30000),
                          .threads = 1,
                          .num_blocks = Blocks(16),
                          .kv_memory = Bytes(15 << 20),
                          .arena = arena};
    auto engine = Engine::load(options);
    if (!engine.ok()) {  // whole extents hold 28,672 tokens or, in layer_major, 16,384
      EXPECT_EQ(engine.status().code(), Code::kCapacity);
      options.context = Tokens(0);
      engine = Engine::load(options);
      ASSERT_TRUE(engine.ok()) << engine.status().message();
    }
    Cache& cache = (*engine)->cache();
    EXPECT_GE(cache.capacity(), (*engine)->context());
    const StepRequest all{.sequence = cache.start({})->id, .n_tokens = (*engine)->context()};
    auto plan = cache.reserve({&all, 1});
    EXPECT_TRUE(plan.ok()) << plan.status().message();
  }
}

TEST(Load, RefusesAContextPastTheTrainedOneUnlessAllowed) {
  EngineOptions options{.model_path = tiny_model(kModel),
                        .context = Tokens(1000),
                        .threads = 1,
                        .num_blocks = Blocks(16),
                        .kv_memory = Bytes(64 << 20)};
  const Status refused = Engine::load(options).status();
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_NE(refused.message().find("512"), std::string::npos) << refused.message();
  options.allow_past_trained_context = true;
  auto engine = Engine::load(options);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  EXPECT_EQ((*engine)->context(), Tokens(1000));
}

TEST(Load, LowersOnlyADefaultNumberOfBlocks) {
  Notices notices;
  EngineOptions options{.model_path = tiny_model(kModel), .threads = 1, .kv_memory = Bytes(4 << 20)};
  auto engine = Engine::load(options);
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  EXPECT_LT((*engine)->cache_options().num_blocks, kDefaultNumBlocks);
  EXPECT_NE(notices.text.find("blocks"), std::string::npos) << notices.text;
  options.num_blocks = Blocks(5000);
  EXPECT_EQ(Engine::load(options).status().code(), Code::kCapacity);
  options.num_blocks = kDefaultNumBlocks;
  options.dynamic = false;
  EXPECT_EQ(Engine::load(options).status().code(), Code::kCapacity);
}

TEST(Load, RefusesOptionsOutOfRange) {
  const EngineOptions good{.model_path = tiny_model(kModel), .threads = 1, .kv_memory = Bytes(64 << 20)};
  auto code_with = [&](auto change) {
    EngineOptions options = good;
    change(options);
    return Engine::load(options).status().code();
  };
  EXPECT_EQ(code_with([](auto& o) { o.threads = -1; }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.threads = 100000; }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.chunk = Tokens(0); }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.context = Tokens(-5); }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.block_size = Tokens(0); }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.num_blocks = Blocks(-1); }), Code::kInvalidArgument);
  EXPECT_EQ(code_with([](auto& o) { o.model_path = "/nowhere.gguf"; }), Code::kNotFound);
}

TEST(Load, TellsItsProgress) {
  std::vector<double> fractions;
  auto engine = Engine::load({.model_path = tiny_model(kModel),
                              .threads = 1,
                              .kv_memory = Bytes(64 << 20),
                              .progress = [&](double fraction) { fractions.push_back(fraction); }});
  ASSERT_TRUE(engine.ok()) << engine.status().message();
  ASSERT_FALSE(fractions.empty());
  EXPECT_EQ(fractions.back(), 1);
}

}  // namespace
}  // namespace pagedkv::engine
