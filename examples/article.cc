// The four snippets of the article "What Is a Paged KV Cache in MTPLX?", in C++.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "pagedkv/paged_kv_cache.h"

using pagedkv::Format;
using pagedkv::KvQuantConfig;
using pagedkv::PagedKVCache;

namespace {

int failures = 0;

void expect(bool claim, const char* what) {
  if (claim) return;
  std::fprintf(stderr, "not so: %s\n", what);
  ++failures;
}

// Keys or values as a model leaves them: [num_kv_heads, n_tokens, head_dim].
constexpr int64_t kHeads = 2, kTokens = 100, kHeadDim = 64;

std::vector<float> some_rows(float phase) {
  std::vector<float> rows(kHeads * kTokens * kHeadDim);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = std::sin(phase + 0.37f * float(i));
  return rows;
}

// 1. A cache of 1024 blocks of 16 tokens.
void initialize() {
  auto cache = PagedKVCache::create({.block_size = 16, .num_blocks = 1024});
  expect(cache.ok(), "a cache can be created");
  if (!cache.ok()) return;
  expect(cache->capacity() == 16 * 1024, "1024 blocks of 16 hold 16384 tokens");
  expect(cache->offset() == 0, "a new cache is empty");
}

// The last token's rows alone: [num_kv_heads, 1, head_dim].
std::vector<float> last_token(const std::vector<float>& rows) {
  std::vector<float> last;
  for (int64_t head = 1; head <= kHeads; ++head) {
    const auto end = rows.begin() + head * kTokens * kHeadDim;
    last.insert(last.end(), end - kHeadDim, end);
  }
  return last;
}

// 2. Taking over existing keys and values, stored in 4 bits. The entry has room for 100 tokens and holds 99.
pagedkv::Result<PagedKVCache> load() {
  const std::vector<float> keys = some_rows(0), values = some_rows(1);
  auto cache = PagedKVCache::from_cache(
      {keys.data(), kHeads, kTokens, kHeadDim}, {values.data(), kHeads, kTokens, kHeadDim}, kTokens - 1,
      {.block_size = 16, .num_blocks = 1024, .kv_quant_config = {Format::kQ4, Format::kQ4}});
  expect(cache.ok() && cache->offset() == kTokens - 1, "a cache can be made from the first 99 of 100 tokens");
  if (!cache.ok()) return cache;

  // The next token, then everything read back: each value within half a step of its row's scale, max|x| / 14.
  const std::vector<float> k = last_token(keys), v = last_token(values);
  auto dense = cache->update_and_fetch({k.data(), kHeads, 1, kHeadDim}, {v.data(), kHeads, 1, kHeadDim});
  expect(dense.ok() && dense->keys.size() == keys.size() && dense->values.size() == values.size(),
         "all 100 tokens can be fetched");
  if (!dense.ok()) return cache;
  float worst = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    worst = std::max({worst, std::fabs(dense->keys[i] - keys[i]), std::fabs(dense->values[i] - values[i])});
  }
  expect(worst > 0 && worst <= 1.0001f / 14, "q4 keeps values of at most 1 within 1/14");
  return cache;
}

// 3. Looking at capacity and growing it by hand.
void grow(PagedKVCache& cache) {
  std::printf("Capacity (tokens): %lld\n", static_cast<long long>(cache.capacity()));
  std::printf("Tokens currently stored: %lld\n", static_cast<long long>(cache.offset()));
  expect(cache.offset() == kTokens, "the cache holds what it was made from");

  const int64_t required_tokens = 20000;
  if (cache.offset() < required_tokens) {
    expect(cache.grow_to_capacity(required_tokens).ok(), "a dynamic cache grows");
  }
  expect(cache.capacity() >= required_tokens, "there is room for 20000 tokens");
  expect(cache.offset() == kTokens, "growing stores nothing");
  expect(cache.stats().growth_bytes_copied == 0, "growing copies nothing");
}

// 4. The mode from the environment, here through the article's own names.
void configure() {
  unsetenv("PAGEDKV_QUANT");
  unsetenv("PAGEDKV_DYNAMIC");
  setenv("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "q4", 1);
  setenv("MTPLX_DYNAMIC_PAGED_KV", "0", 1);
  auto options = pagedkv::paged_kv_options_from_env({.num_blocks = 4});
  expect(options.ok() && options->kv_quant_config == KvQuantConfig{Format::kQ4, Format::kQ4},
         "the variable says q4");
  expect(options.ok() && !options->dynamic, "the variable says not to grow");
  if (!options.ok()) return;

  // Without growth, a full cache is an error that says so, and nothing was written.
  auto cache = PagedKVCache::create(*options);
  expect(cache.ok(), "a cache can be created");
  if (!cache.ok()) return;
  const std::vector<float> rows = some_rows(2);
  const pagedkv::HeadMajorRows k{rows.data(), kHeads, kTokens, kHeadDim};
  const pagedkv::Status full = cache->update_without_fetch(k, k);
  expect(full.code() == pagedkv::Code::kCapacity && cache->offset() == 0, "100 tokens do not fit in 64 slots");
  std::printf("%s\n", full.message().c_str());

  setenv("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "q5", 1);
  options = pagedkv::paged_kv_options_from_env();
  expect(!options.ok() && options.status().message().find("q8") != std::string::npos,
         "an unknown mode lists the modes");
}

}  // namespace

int main() {
  initialize();
  if (auto cache = load(); cache.ok()) grow(*cache);
  configure();
  return failures == 0 ? 0 : 1;
}
