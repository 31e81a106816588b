// Planning: the rows of a step as work items that parts can share, once for all layers of a group.
// Not a kernel: it is called once a step and allocates, so it has a folder of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace pagedkv::kernels {

struct Work {
  std::vector<WorkItem> items;
  std::vector<MergeItem> merges;
  int64_t total_cost = 0;    // AttendCall::total_cost
  int64_t partial_rows = 0;  // each has a partial of every query head
};

// Replaces what `work` holds, reusing its memory. Every new token of every sequence is in exactly one item, or,
// where its sequence is split, in one item a run. Only batch's sizes, seq_lens and query_start_loc are read. How
// many query heads there are comes with the call: it changes how much each item costs, not how they compare.
void plan_work(const Batch& batch, int64_t sliding_window, int64_t num_kv_heads, Work& work);

}  // namespace pagedkv::kernels
