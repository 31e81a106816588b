// The cache object of the article "What Is a Paged KV Cache in MTPLX?": one layer, one sequence, blocks inside.
//
// For engines use Cache (cache.h); this face is for code that thinks of a cache as keys and values that grow.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "pagedkv/attention.h"
#include "pagedkv/cache.h"
#include "pagedkv/export.h"
#include "pagedkv/format.h"

namespace pagedkv {

struct PagedKVCacheOptions {
  int64_t block_size = 16;
  int64_t num_blocks = 1024;
  KvQuantConfig kv_quant_config;
  bool dynamic = true;  // false: a full cache is a capacity error
  ArenaOrder arena = ArenaOrder::kBlockMajor;
};

// The options with kv_quant_config and dynamic as the environment says (PAGEDKV_QUANT, PAGEDKV_DYNAMIC and the
// article's names). Read at each call. Errors: kInvalidArgument with the variable, its value and what is allowed.
PKV_API Result<PagedKVCacheOptions> paged_kv_options_from_env(PagedKVCacheOptions defaults = {});

// K or V with the article's axes: [num_kv_heads, n_tokens, head_dim], dense float32.
struct HeadMajorRows {
  const float* data = nullptr;
  int64_t num_kv_heads = 0;
  int64_t n_tokens = 0;
  int64_t head_dim = 0;
};

struct DenseKv {
  std::vector<float> keys, values;  // [num_kv_heads, offset, head_dim]
};

// One thread.
class PKV_API PagedKVCache {
 public:
  // Shapes are taken from the first write; until then no memory is held.
  // Errors: kInvalidArgument (sizes).
  static Result<PagedKVCache> create(const PagedKVCacheOptions& options = {});
  // Takes over the first `offset` tokens of existing keys and values.
  static Result<PagedKVCache> from_cache(const HeadMajorRows& keys, const HeadMajorRows& values, int64_t offset,
                                         const PagedKVCacheOptions& options = {});
  PagedKVCache(PagedKVCache&&) noexcept;
  PagedKVCache& operator=(PagedKVCache&&) noexcept;
  ~PagedKVCache();

  int64_t capacity() const;  // tokens that fit without growing
  int64_t offset() const;    // tokens stored

  // Appends and returns everything stored, decoded (a dense form, counted in dense_materializations).
  Result<DenseKv> update_and_fetch(const HeadMajorRows& keys, const HeadMajorRows& values);
  // Appends. On error nothing changed. Errors: kInvalidArgument, kCapacity, kNotFinite.
  Status update_without_fetch(const HeadMajorRows& keys, const HeadMajorRows& values);
  // Causal attention of the newest n_tokens positions over the packed blocks.
  //   q    [num_q_heads, n_tokens, head_dim]; the last row belongs to position offset - 1
  //   out  [num_q_heads, n_tokens, head_dim_v]
  struct AttentionOptions {
    float scale = 0;             // 0: 1/sqrt(head_dim)
    int64_t sliding_window = 0;  // 0: none
    float softcap = 0;           // 0: off
  };
  Result<std::vector<float>> paged_attention(const HeadMajorRows& q, const AttentionOptions& options);
  Result<std::vector<float>> paged_attention(const HeadMajorRows& q) { return paged_attention(q, {}); }

  // Removes the last n tokens (at most offset()); returns how many.
  int64_t trim(int64_t n);
  // Makes room for `tokens` in all, now. Errors: kCapacity when dynamic is off or memory ends.
  Status grow_to_capacity(int64_t tokens);
  Stats stats() const;

 private:
  struct Impl;
  explicit PagedKVCache(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv
