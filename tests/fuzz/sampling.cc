// Any grammar, bias and sampling options, on vocabularies with all bytes, few of them, and letters alone: an answer
// grows by tokens that its grammar derives, or ends with a Status. Nothing of it aborts, throws or runs away.
#include <fuzzer/FuzzedDataProvider.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>

#include "engine/grammar.h"
#include "engine/text.h"
#include "tests/fuzz/require.h"

namespace {

using namespace pagedkv;
using namespace pagedkv::engine;

constexpr int kSteps = 40;

const Text& vocabulary(size_t which) {
  static const auto load = [](const char* name) {
    return Text::load(std::string(PAGEDKV_FUZZ_VOCABULARIES "/") + name + ".gguf").value();
  };
  static const std::unique_ptr<Text> all[] = {load("d64_gqa3_tied"), load("spm_letters"), load("bpe_few_bytes")};
  return *all[which];
}

// SentencePiece writes a space as U+2581, and so reads U+2581 as a space.
std::string with_spaces(std::string text) {
  constexpr std::string_view kWordMark = "\u2581";
  for (size_t at = 0; (at = text.find(kWordMark, at)) != std::string::npos;)
    text.replace(at, kWordMark.size(), " ");
  return text;
}

void expect_spelled(const Text& text, const std::string& plain) {
  const auto tokens = text.tokenize(plain, false, false);
  if (!tokens.ok())
    require(tokens.status().code() == Code::kInvalidArgument);
  else
    require(text.spell(*tokens) == (text.has_space_prefix() ? with_spaces(plain) : plain));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  FuzzedDataProvider data(bytes, size);
  const Text& text = vocabulary(data.ConsumeIntegralInRange<size_t>(0, 2));
  const auto vocab = size_t(text.vocab_size());
  SamplingOptions options{.temperature = data.ConsumeFloatingPointInRange(-1.0f, 3.0f),
                          .top_k = data.ConsumeIntegralInRange(-1, 400),
                          .top_p = data.ConsumeFloatingPointInRange(-0.1f, 1.1f),
                          .min_p = data.ConsumeFloatingPointInRange(-0.1f, 1.1f),
                          .repeat_penalty = data.ConsumeFloatingPointInRange(0.0f, 11.0f),
                          .repeat_last_n = data.ConsumeIntegralInRange(-1, 70),
                          .seed = data.ConsumeIntegral<uint64_t>(),
                          .presence_penalty = data.ConsumeFloatingPointInRange(-2.1f, 2.1f),
                          .frequency_penalty = data.ConsumeFloatingPointInRange(-2.1f, 2.1f)};
  for (int n = data.ConsumeIntegralInRange(0, 4); n > 0; --n) {
    const int32_t token = data.ConsumeIntegralInRange<int32_t>(-1, int32_t(vocab));
    options.logit_bias.emplace_back(token, data.ConsumeFloatingPointInRange(-101.0f, 101.0f));
  }
  const bool with_grammar = data.ConsumeBool();
  const float odd = data.ConsumeFloatingPoint<float>();  // a logit that may be NaN or infinite
  std::mt19937 random(data.ConsumeIntegral<uint32_t>());
  const std::string rest = data.ConsumeRemainingBytesAsString();
  if (!with_grammar) expect_spelled(text, rest);

  std::unique_ptr<GrammarState> follows;
  if (with_grammar) {
    options.grammar = rest;
    if (auto grammar = Grammar::parse(rest); grammar.ok())
      follows = std::make_unique<GrammarState>(*grammar);
    else
      require(grammar.status().code() == Code::kInvalidArgument &&
              grammar.status().message().starts_with("[grammar]"));
  }
  auto sampler = text.make_sampler(options);
  if (!sampler.ok()) {
    require(sampler.status().code() == Code::kInvalidArgument);
    return 0;
  }
  require(!with_grammar || rest.empty() || follows != nullptr);
  std::vector<float> logits(vocab);
  for (int step = 0; step < kSteps; ++step) {
    for (float& logit : logits) logit = float(random() % 2000) / 100 - 10;
    if (random() % 8 == 0) logits[random() % vocab] = odd;
    const auto token = (*sampler)->sample(logits);
    if (!token.ok()) {
      require(token.status().code() == Code::kInvalidArgument || token.status().code() == Code::kNotFinite);
      break;
    }
    require(*token >= 0 && size_t(*token) < vocab);
    if (!follows) continue;
    if (text.is_end(*token)) {
      require(follows->complete());
      break;
    }
    require(follows->advance(text.piece(*token)));
  }
  return 0;
}
