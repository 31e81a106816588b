#include "tests/engine/quality.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "tests/engine/world.h"

namespace pagedkv::engine {

void expect_to_predict_as_well_as_libllama(const std::string& model, const std::string& text, int chunk) {
  constexpr int kTokens = 2048;
  std::vector<int32_t> tokens;
  const auto libllama = [&](bool flash) {
    Oracle oracle(model, {.context = kTokens, .flash = flash, .f16_kv = true});
    if (tokens.empty()) tokens = oracle.tokenize(text.substr(0, 16 * kTokens));
    if (tokens.size() > kTokens) tokens.resize(kTokens);
    Quality q(tokens, oracle.vocab_size());
    oracle.each_chunk(tokens, chunk, [&](std::span<const float> rows) { q.add(rows); });
    return q;
  };
  const Quality plain = libllama(false), flash = libllama(true);
  ASSERT_EQ(tokens.size(), size_t(kTokens)) << "the text is too short";
  const auto pagedkv = [&](ProductsChoice products) {
    World world({.model_path = model, .threads = 1, .products = products});
    Quality q(tokens, world.vocab_size());
    world.each_chunk(tokens, chunk, [&](std::span<const float> rows) { q.add(rows); });
    return q;
  };
  // With ggml's products nothing but attention differs from libllama.
  const Quality ours = pagedkv(ProductsChoice::kGgml), own = pagedkv(ProductsChoice::kAuto);

  const double noise = plain.agreement(flash);  // libllama with itself
  const double same = ours.agreement(plain);
  // Of the difference of two shares that are about `noise`.
  const double share_error = std::sqrt(2 * noise * (100 - noise) / kTokens);
  std::printf(
      "perplexity: pagedkv %.4f, libllama %.4f, its flash kernel %.4f; standard error of the ratio %.2f %%\n",
      ours.perplexity(), plain.perplexity(), flash.perplexity(), 100 * ours.standard_error(plain));
  std::printf("same best token as libllama: pagedkv %.2f %%, its flash kernel %.2f %%\n", same, noise);
  const double low = std::min(plain.perplexity(), flash.perplexity());
  const double high = std::max(plain.perplexity(), flash.perplexity());
  EXPECT_GE(ours.perplexity(), low * (1 - 0.002));
  EXPECT_LE(ours.perplexity(), high * (1 + 0.002));
  EXPECT_GE(same, noise - 0.2 - 2 * share_error);
  // Ours round the activations in other places: no worse, by what so few tokens can tell.
  const double own_error = own.standard_error(plain);
  std::printf("with our products: %.4f, standard error of the ratio %.2f %%, same best token %.2f %%\n",
              own.perplexity(), 100 * own_error, own.agreement(plain));
  EXPECT_GE(own.perplexity(), low * (1 - 3 * own_error));
  EXPECT_LE(own.perplexity(), high * (1 + 3 * own_error));
  EXPECT_GE(own.agreement(plain), noise - 2);
}

}  // namespace pagedkv::engine
