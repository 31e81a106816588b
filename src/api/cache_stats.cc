// A cache's figures, and the names of its words.

#include <algorithm>

#include "api/cache_impl.h"

namespace pagedkv {

const char* prefix_reason_name(PrefixReason reason) {
  switch (reason) {
    case PrefixReason::kHit:
      return "hit";
    case PrefixReason::kNew:
      return "new";
    case PrefixReason::kEvicted:
      return "evicted";
    case PrefixReason::kWindowGone:
      return "window_gone";
    case PrefixReason::kLastToken:
      return "last_token";
    case PrefixReason::kCollision:
      return "collision";
    case PrefixReason::kNoRoom:
      return "no_room";
    case PrefixReason::kOff:
      return "off";
  }
  return "unknown";
}

const char* arena_order_name(ArenaOrder order) {
  return order == ArenaOrder::kBlockMajor ? "block_major" : "layer_major";
}

Stats Cache::stats(bool resident) const {
  Stats s;
  const CacheCore& core = *impl_->core;
  for (int g = 0; g < core.n_groups(); ++g) {
    const Arena& arena = *impl_->arenas[size_t(g)];
    const BlockPool& pool = core.pool(g);
    const auto& counts = pool.counts();
    s.bytes_reserved += arena.bytes_reserved();
    s.bytes_committed += arena.bytes_committed();
    if (resident) s.bytes_resident += arena.bytes_resident();
    s.extent_bytes = std::max(s.extent_bytes, arena.layout().extent_bytes);
    s.bytes_in_use += (counts.open + counts.full + counts.shared) * arena.layout().image_bytes;
    s.blocks_total += counts.total;
    s.blocks_free += counts.free;
    s.blocks_open += counts.open;
    s.blocks_full += counts.full;
    s.blocks_shared += counts.shared;
    s.blocks_cached += counts.cached;
    s.quarantined_blocks += counts.quarantined;
    s.alloc_events += pool.events().alloc;
    s.growth_events += pool.events().growth;
    s.shrink_events += pool.events().shrink;
    s.evictions += pool.events().eviction;
  }
  if (s.blocks_total > 0)
    s.block_utilization = double(s.blocks_total - s.blocks_free - s.blocks_cached) / double(s.blocks_total);
  const auto figures = core.figures();
  s.sequences = figures.sequences;
  s.tokens = figures.tokens;
  s.copies = figures.copies;
  s.keyed_passed_over = figures.keyed_passed_over;
  s.hit_tokens = figures.tokens_by_reason[size_t(PrefixReason::kHit)];
  for (int reason = 0; reason < kPrefixReasons; ++reason) {
    const int64_t tokens = figures.tokens_by_reason[size_t(reason)];
    if (tokens > 0) s.hits_by_reason[prefix_reason_name(PrefixReason(reason))] = tokens;
  }
  s.dense_materializations = impl_->dense_materializations;
  s.dequantized_rows = impl_->dequantized_rows;
  s.floor_clamped_rows = impl_->append_counters.floor_clamped_rows;
  s.saturated_values = impl_->append_counters.saturated_values;
  const char* names[] = {"append", "attend", "merge"};
  for (int kernel = 0; kernel < Impl::kKernels; ++kernel)
    if (const int64_t n = impl_->calls[kernel].load(std::memory_order_relaxed); n > 0)
      s.kernel_calls[str(names[kernel], ".", impl_->entry->name)] = n;
  if (impl_->entry == &kernels::entries().back())
    for (const char* name : names) s.fallbacks[name] = str("the portable ", impl_->entry->name, " kernels run");
  return s;
}

}  // namespace pagedkv
