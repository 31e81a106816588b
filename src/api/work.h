// Planning: the rows of a step as work items that parts can share, once for all layers of a group.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace pagedkv {

struct WorkTotals {
  int64_t total_cost = 0;  // AttendCall::total_cost
  int64_t n_partials = 0;  // rows of AttendCall::partials
};

// Replaces the contents of `items` and `merges` (their memory is reused). Every new token of every sequence is in
// exactly one item, or, where its sequence is split, in one item a run. Only batch's sizes, seq_lens and
// query_start_loc are read.
WorkTotals plan_work(const kernels::Batch& batch, const kernels::AttendShape& shape, int64_t num_kv_heads,
                     std::vector<kernels::WorkItem>& items, std::vector<kernels::MergeItem>& merges);

}  // namespace pagedkv
