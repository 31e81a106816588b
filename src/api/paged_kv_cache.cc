// The article's cache object on one layer and one sequence of a Cache.

#include "pagedkv/paged_kv_cache.h"

#include <algorithm>
#include <cstdlib>

#include "base/env.h"
#include "base/text.h"
#include "pagedkv/scratch.h"

namespace pagedkv {
namespace {

KvRows rows_of(const HeadMajorRows& rows) {
  return {.data = rows.data, .token_stride = rows.head_dim, .head_stride = rows.n_tokens * rows.head_dim};
}

}  // namespace

Result<PagedKVCacheOptions> paged_kv_options_from_env(PagedKVCacheOptions defaults) {
  auto config = kv_quant_from_env();
  if (!config.ok()) return config.status();
  auto dynamic = env_flag({"PAGEDKV_DYNAMIC", "MTPLX_DYNAMIC_PAGED_KV"}, defaults.dynamic);
  if (!dynamic.ok()) return dynamic.status();
  if (env_first({"PAGEDKV_QUANT", "MTPLX_VLLM_METAL_PAGED_KV_QUANT", "MTPLX_PAGED_KV_QUANT"}))
    defaults.kv_quant_config = *config;
  defaults.dynamic = *dynamic;
  return defaults;
}

struct PagedKVCache::Impl {
  PagedKVCacheOptions options;
  LayerShape shape;              // from the first write
  std::unique_ptr<Cache> cache;  // null until then
  SequenceId sequence;

  Status open(const HeadMajorRows& keys, const HeadMajorRows& values);
  Status check(const HeadMajorRows& keys, const HeadMajorRows& values) const;
  int64_t offset() const { return cache ? cache->length(sequence)->n : 0; }
};

PagedKVCache::PagedKVCache(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
PagedKVCache::PagedKVCache(PagedKVCache&&) noexcept = default;
PagedKVCache& PagedKVCache::operator=(PagedKVCache&&) noexcept = default;
PagedKVCache::~PagedKVCache() = default;

Result<PagedKVCache> PagedKVCache::create(const PagedKVCacheOptions& options) {
  // Sizes that can never work fail here, not at the first write.
  if (options.block_size < 1 || options.block_size > 256)
    return invalid_argument(str("[PagedKVCache] block_size is ", options.block_size, ", allowed are 1 to 256"));
  if (options.num_blocks < 1 || options.num_blocks > kMaxBlocks)
    return invalid_argument(
        str("[PagedKVCache] num_blocks is ", options.num_blocks, ", allowed are 1 to ", kMaxBlocks));
  auto impl = std::make_unique<Impl>();
  impl->options = options;
  return PagedKVCache(std::move(impl));
}

Result<PagedKVCache> PagedKVCache::from_cache(const HeadMajorRows& keys, const HeadMajorRows& values,
                                              int64_t offset, const PagedKVCacheOptions& options) {
  if (offset < 0 || offset > keys.n_tokens || offset > values.n_tokens)
    return invalid_argument(str("[from_cache] offset is ", offset, ", keys hold ", keys.n_tokens,
                                " tokens and values ", values.n_tokens));
  auto made = create(options);
  if (!made.ok() || offset == 0) return made;
  // Longer arrays than the offset are how preallocating caches look: only the first `offset` tokens count.
  const auto first_tokens = [offset](const HeadMajorRows& rows, std::vector<float>& kept) {
    if (rows.n_tokens == offset) return rows;
    for (int64_t h = 0; h < rows.num_kv_heads; ++h) {
      const float* from = rows.data + h * rows.n_tokens * rows.head_dim;
      kept.insert(kept.end(), from, from + offset * rows.head_dim);
    }
    return HeadMajorRows{kept.data(), rows.num_kv_heads, offset, rows.head_dim};
  };
  std::vector<float> kept_keys, kept_values;
  const auto k = first_tokens(keys, kept_keys), v = first_tokens(values, kept_values);
  if (Status status = made->update_without_fetch(k, v); !status.ok()) return status;
  return made;
}

Status PagedKVCache::Impl::check(const HeadMajorRows& keys, const HeadMajorRows& values) const {
  if (keys.data == nullptr || values.data == nullptr) return invalid_argument("[update] keys or values are null");
  if (keys.num_kv_heads != values.num_kv_heads || keys.n_tokens != values.n_tokens || keys.n_tokens < 1)
    return invalid_argument(str("[update] keys are [", keys.num_kv_heads, ", ", keys.n_tokens, ", ", keys.head_dim,
                                "], values [", values.num_kv_heads, ", ", values.n_tokens, ", ", values.head_dim,
                                "]"));
  if (cache && (keys.num_kv_heads != shape.num_kv_heads || keys.head_dim != shape.head_dim_k ||
                values.head_dim != shape.head_dim_v))
    return invalid_argument(str("[update] heads x head_dim are ", keys.num_kv_heads, " x ", keys.head_dim, ":",
                                values.head_dim, ", the cache was made for ", shape.num_kv_heads, " x ",
                                shape.head_dim_k, ":", shape.head_dim_v));
  return Status();
}

Status PagedKVCache::Impl::open(const HeadMajorRows& keys, const HeadMajorRows& values) {
  shape = {keys.num_kv_heads, keys.head_dim, values.head_dim, options.kv_quant_config};
  CacheOptions cache_options{.groups = {GroupSpec{.shape = shape, .layers = {0}}},
                             .block_size = Tokens(options.block_size),
                             .num_blocks = Blocks(options.num_blocks),
                             .dynamic = options.dynamic,
                             .arena = options.arena,
                             .prefix_sharing = false};
  auto made = Cache::create(std::move(cache_options));
  if (!made.ok()) return made.status();
  auto started = (*made)->start({});
  if (!started.ok()) return started.status();
  cache = std::move(*made);
  sequence = started->id;
  return Status();
}

int64_t PagedKVCache::capacity() const {
  return impl_->cache ? impl_->cache->committed_capacity().n
                      : impl_->options.block_size * impl_->options.num_blocks;
}

int64_t PagedKVCache::offset() const { return impl_->offset(); }

Status PagedKVCache::update_without_fetch(const HeadMajorRows& keys, const HeadMajorRows& values) {
  if (Status status = impl_->check(keys, values); !status.ok()) return status;
  if (!impl_->cache)
    if (Status status = impl_->open(keys, values); !status.ok()) return status;
  Cache& cache = *impl_->cache;
  const StepRequest request{.sequence = impl_->sequence, .tokens = {}, .n_tokens = Tokens(keys.n_tokens)};
  auto plan = cache.reserve({&request, 1});
  if (!plan.ok()) return plan.status();
  if (Status status = cache.append(*plan, 0, rows_of(keys), rows_of(values)); !status.ok()) return status;
  auto statuses = cache.commit(std::move(*plan));
  if (!statuses.ok()) return statuses.status();
  return statuses->front();
}

Result<DenseKv> PagedKVCache::update_and_fetch(const HeadMajorRows& keys, const HeadMajorRows& values) {
  if (Status status = update_without_fetch(keys, values); !status.ok()) return status;
  auto dense = impl_->cache->read_dense(impl_->sequence, 0);
  if (!dense.ok()) return dense.status();
  const int64_t n = offset(), heads = impl_->shape.num_kv_heads;
  const auto head_major = [&](const std::vector<float>& rows, int64_t head_dim) {  // from [n, heads, head_dim]
    std::vector<float> out(rows.size());
    for (int64_t t = 0; t < n; ++t)
      for (int64_t h = 0; h < heads; ++h)
        std::copy_n(rows.begin() + (t * heads + h) * head_dim, head_dim, out.begin() + (h * n + t) * head_dim);
    return out;
  };
  return DenseKv{head_major(dense->k, impl_->shape.head_dim_k), head_major(dense->v, impl_->shape.head_dim_v)};
}

Result<std::vector<float>> PagedKVCache::paged_attention(const HeadMajorRows& q, const AttentionOptions& options) {
  if (!impl_->cache) return invalid_argument("[paged_attention] the cache is empty");
  const LayerShape& shape = impl_->shape;
  if (q.data == nullptr || q.head_dim != shape.head_dim_k || q.num_kv_heads < 1)
    return invalid_argument(str("[paged_attention] q is [", q.num_kv_heads, ", ", q.n_tokens, ", ", q.head_dim,
                                "], the cache has head_dim ", shape.head_dim_k));
  if (options.sliding_window < 0)
    return invalid_argument(str("[paged_attention] sliding_window is ", options.sliding_window));
  Cache& cache = *impl_->cache;
  const ReadRequest request{impl_->sequence, Tokens(q.n_tokens)};
  auto plan = cache.plan_read({&request, 1});
  if (!plan.ok()) return plan.status();
  const int64_t n = q.n_tokens, heads = q.num_kv_heads;
  std::vector<float> token_major(size_t(n * heads * q.head_dim)), out(size_t(n * heads * shape.head_dim_v));
  for (int64_t h = 0; h < heads; ++h)
    for (int64_t t = 0; t < n; ++t)
      std::copy_n(q.data + (h * n + t) * q.head_dim, q.head_dim,
                  token_major.begin() + (t * heads + h) * q.head_dim);
  Scratch memory;
  const auto scratch = memory.get(cache.scratch_bytes(*plan, 1, heads));
  if (!scratch.ok()) return scratch.status();
  const AttendArgs args{.plan = *plan,
                        .num_q_heads = heads,
                        .q = token_major.data(),
                        .out = out.data(),
                        .scale = options.scale,
                        .softcap = options.softcap,
                        .sliding_window = options.sliding_window,
                        .scratch = *scratch};
  if (Status status = cache.attend(args); !status.ok()) return status;
  if (Status status = cache.merge(args); !status.ok()) return status;
  std::vector<float> head_major(out.size());
  for (int64_t t = 0; t < n; ++t)
    for (int64_t h = 0; h < heads; ++h)
      std::copy_n(out.begin() + (t * heads + h) * shape.head_dim_v, shape.head_dim_v,
                  head_major.begin() + (h * n + t) * shape.head_dim_v);
  return head_major;
}

int64_t PagedKVCache::trim(int64_t n) {
  const int64_t removed = std::clamp<int64_t>(n, 0, offset());
  if (removed > 0 && !impl_->cache->truncate(impl_->sequence, Tokens(offset() - removed)).ok()) return 0;
  return removed;
}

Status PagedKVCache::grow_to_capacity(int64_t tokens) {
  if (tokens < 0) return invalid_argument(str("[grow_to_capacity] ", tokens, " tokens are asked"));
  if (tokens <= capacity()) return Status();
  if (!impl_->options.dynamic) {
    const int64_t need = blocks_for(Tokens(tokens), Tokens(impl_->options.block_size)).n;
    return Status(Code::kCapacity,
                  str("[grow_to_capacity] need ", tokens, " tokens (", need, " blocks), have ", capacity(),
                      " tokens (", capacity() / impl_->options.block_size, " blocks); dynamic growth is off"));
  }
  if (impl_->cache) return impl_->cache->grow_to_capacity(Tokens(tokens));
  const int64_t blocks = blocks_for(Tokens(tokens), Tokens(impl_->options.block_size)).n;
  if (blocks > kMaxBlocks)
    return Status(Code::kCapacity,
                  str("[grow_to_capacity] ", blocks, " blocks are needed, the limit is ", kMaxBlocks));
  impl_->options.num_blocks = blocks;  // the shape is unknown: taken at the first write
  return Status();
}

Stats PagedKVCache::stats() const { return impl_->cache ? impl_->cache->stats() : Stats{}; }

}  // namespace pagedkv
