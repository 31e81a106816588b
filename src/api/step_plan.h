// What a StepPlan holds behind its face.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cache/step_arrays.h"
#include "kernels/kernels.h"
#include "kernels/plan/work.h"
#include "pagedkv/cache.h"

namespace pagedkv {

struct StepPlan::Impl {
  // Where a plan that writes goes at its end: an open step ends there, and a later one fills the arrays again.
  class Home {
   public:
    virtual ~Home() = default;
    virtual void take_back(std::unique_ptr<Impl> plan) = 0;
  };

  StepArrays arrays;
  std::vector<kernels::Work> work;  // per group
  std::vector<uint64_t> faults;     // per sequence: kernels::kNoFault or its first row that is not finite
  uint64_t owner = 0;               // Cache::Impl::id of the cache that made it; 0: none
  bool read_only = false;           // made by plan_read: nothing to append or commit
  std::weak_ptr<Home> home;         // of a plan that writes

  kernels::Batch batch(size_t group) const {
    const StepArrays::Group& g = arrays.groups[group];
    return {.n_sequences = int64_t(arrays.sequences.size()),
            .n_tokens = int64_t(arrays.positions.size()),
            .max_blocks = g.max_blocks,
            .block_tables = g.block_tables.data(),
            .seq_lens = arrays.seq_lens.data(),
            .query_start_loc = arrays.query_start_loc.data(),
            .slot_mapping = g.slot_mapping.data()};
  }
};

}  // namespace pagedkv
