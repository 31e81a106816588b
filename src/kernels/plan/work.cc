#include "kernels/plan/work.h"

#include <algorithm>

namespace pagedkv::kernels {
namespace {

// About the multiplications of one KV head; the constants stand for what does not depend on the number of rows
// (reading and decoding) and of keys (setting up).
int64_t cost_of(int64_t n_rows, int64_t n_keys) { return (n_rows + 2) * (n_keys + 16); }

struct Keys {
  int64_t begin = 0, end = 0;
};

// Keys that some of the rows at positions [first, last] see.
Keys visible(int64_t first, int64_t last, int64_t window) {
  const int64_t end = std::max<int64_t>(last + 1, 0);
  return {window > 0 ? std::clamp<int64_t>(first - window + 1, 0, end) : 0, end};
}

}  // namespace

void plan_work(const Batch& batch, int64_t sliding_window, int64_t num_kv_heads, Work& work) {
  work.items.clear();
  work.merges.clear();
  work.total_cost = work.partial_rows = 0;
  const auto add = [&](WorkItem item) {
    item.cost_before = work.total_cost;
    work.total_cost += item.cost * num_kv_heads;
    work.items.push_back(item);
  };
  for (int32_t sequence = 0; sequence < batch.n_sequences; ++sequence) {
    const int32_t row_begin = batch.query_start_loc[sequence], row_end = batch.query_start_loc[sequence + 1];
    const int64_t n_rows = row_end - row_begin;
    const int64_t first_position = batch.seq_lens[sequence] - n_rows;
    if (n_rows <= 0) continue;
    const Keys keys = visible(first_position, first_position + n_rows - 1, sliding_window);
    const auto run_begin = int32_t(keys.begin / kRunTokens);
    const auto run_end = int32_t((keys.end + kRunTokens - 1) / kRunTokens);

    if (n_rows <= kMaxSplitRows && run_end - run_begin > 1) {
      work.merges.push_back({sequence, row_begin, row_end, run_begin, run_end, work.partial_rows});
      for (int32_t run = run_begin; run < run_end; ++run) {
        const int64_t n_keys = std::min(keys.end, (run + 1) * kRunTokens) - std::max(keys.begin, run * kRunTokens);
        add({.sequence = sequence,
             .row_begin = row_begin,
             .row_end = row_end,
             .run_begin = run,
             .run_end = run + 1,
             .partial = work.partial_rows,
             .cost = cost_of(n_rows, n_keys)});
        work.partial_rows += n_rows;
      }
      continue;
    }
    for (int32_t row = row_begin; row < row_end; row += int32_t(kRowTile)) {
      const int32_t tile_end = std::min(row_end, row + int32_t(kRowTile));
      const int64_t first = first_position + row - row_begin, last = first_position + tile_end - 1 - row_begin;
      const Keys tile = visible(first, last, sliding_window);
      // Causal rows see half of the last keys on average.
      const int64_t n_keys = tile.end - tile.begin - std::min<int64_t>(tile.end, tile_end - row) / 2;
      add({.sequence = sequence,
           .row_begin = row,
           .row_end = tile_end,
           .run_begin = int32_t(tile.begin / kRunTokens),
           .run_end = int32_t((tile.end + kRunTokens - 1) / kRunTokens),
           .cost = cost_of(tile_end - row, n_keys)});
    }
  }
}

}  // namespace pagedkv::kernels
