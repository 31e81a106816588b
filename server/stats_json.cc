#include "server/stats_json.h"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>

namespace pagedkv::server {
namespace {

constexpr int64_t kMaxDrawnBlocks = 8192;  // of the pool's map on the page

// What is allocated and not freed: unlike resident memory it does not depend on what the allocator keeps for later.
std::optional<int64_t> heap_live_bytes() {
#ifdef __GLIBC__
  const struct mallinfo2 info = mallinfo2();
  return int64_t(info.uordblks + info.hblkhd);
#else
  return std::nullopt;
#endif
}

// Parallel lists, short for the wire: state by letter (- free o open f full s shared c cached . no memory). Of a
// large pool they hold the first blocks; the counts are of all.
OrderedJson blocks_json(const BlockViews& views) {
  constexpr std::string_view kLetters = ".-ofsc";
  std::string states;
  std::array<int64_t, kLetters.size()> counts{};
  for (const BlockView& b : views.blocks) ++counts[size_t(b.state)];
  OrderedJson counted;
  for (size_t i = 0; i < kLetters.size(); ++i) counted[std::string(1, kLetters[i])] = counts[i];
  OrderedJson holders = OrderedJson::array(), ages = holders, sequences = holders, keys = holders;
  const auto n = std::min<int64_t>(std::ssize(views.blocks), kMaxDrawnBlocks);
  for (int64_t i = 0; i < n; ++i) {
    const BlockView& b = views.blocks[size_t(i)];
    states += kLetters[size_t(b.state)];
    holders.push_back(b.holders);
    ages.push_back(views.step - b.last_step);
    sequences.push_back(b.sequence);
    char key[20] = "";
    if (b.key != 0) std::snprintf(key, sizeof key, "%016llx", static_cast<unsigned long long>(b.key));
    keys.push_back(key);
  }
  return {{"total", views.blocks.size()},  {"counts", std::move(counted)}, {"states", states},
          {"holders", std::move(holders)}, {"ages", std::move(ages)},      {"sequences", std::move(sequences)},
          {"keys", std::move(keys)}};
}

OrderedJson tier_json(const engine::TierFigures& f) {
  OrderedJson out = {{"open", f.open},
                     {"bytes", f.tier.bytes},
                     {"budget", f.tier.budget},
                     {"blocks", f.tier.blocks},
                     {"image_bytes", f.tier.image_bytes},
                     {"evicted", f.tier.evicted},
                     {"expired", f.tier.expired},
                     {"bytes_read", f.tier.bytes_read},
                     {"bytes_written", f.tier.bytes_written},
                     {"down", f.tier.down}};
  for (int i = 0; i < kTierOutcomes; ++i) {
    out["gets"][tier_outcome_name(TierOutcome(i))] = f.tier.gets[i];
    out["puts"][tier_outcome_name(TierOutcome(i))] = f.tier.puts[i];
  }
  for (const auto& [name, value] : engine::named_counts(f)) out[name] = value;
  out["restore_seconds"] = f.restore_seconds;
  return out;
}

}  // namespace

OrderedJson stats_json(const StatsInput& in) {
  OrderedJson out = {
      {"model", in.model},
      {"context", in.context.n},
      {"block_size", in.block_size.n},
      {"kv_quant", in.kv_quant},
      {"isa", in.isa},
      {"cache", OrderedJson::parse(to_json(in.scheduler.cache))},
      {"scheduler", {{"max_num_seqs", in.options.max_num_seqs}, {"max_queue", in.options.max_queue}}},
      {"http",
       {{"connections", in.http.connections},
        {"bad_requests", in.http.bad_requests},
        {"gone", in.http.gone},
        {"slow_readers", in.http.slow_readers}}}};
  for (const auto& [name, value] : engine::named_counts(in.scheduler)) out["scheduler"][name] = value;
  for (const auto& [name, value] : engine::named_seconds(in.scheduler)) out["scheduler"][name] = value;
  if (in.scheduler.tier) out["tier"] = tier_json(*in.scheduler.tier);
  if (const auto live = heap_live_bytes()) out["heap_live_bytes"] = *live;
  if (in.with_blocks) out["blocks"] = blocks_json(in.scheduler.blocks);
  return out;
}

}  // namespace pagedkv::server
