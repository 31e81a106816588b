// What a Cache holds behind its face: joins what decides (cache/), what moves (store/) and what computes
// (kernels/).
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "api/layer_attention.h"
#include "api/query_path.h"
#include "api/step_plan.h"
#include "base/check.h"
#include "base/text.h"
#include "cache/cache_core.h"
#include "kernels/kernels.h"
#include "kernels/plan/work.h"
#include "pagedkv/cache.h"
#include "store/arena.h"
#include "store/mover.h"

namespace pagedkv {

struct LayerPlace {
  int group = -1;
  int index = 0;  // within the group
};

// Lets the cache ask one group's arena for memory.
class ArenaSource : public BlockSource {
 public:
  explicit ArenaSource(Arena& arena) : arena_(arena) {}
  Status commit(int64_t extent) override { return arena_.commit(extent); }
  void decommit(int64_t extent) override { arena_.decommit(extent); }
  int64_t bytes_committed() const override { return arena_.bytes_committed(); }
  int64_t blocks_left_by_budget() const override { return arena_.blocks_left_by_budget(); }

 private:
  Arena& arena_;
};

struct GroupDraft;  // create.cc

struct Cache::Impl : StepPlan::Impl::Home {
  enum Kernel { kAppend, kAttend, kMerge, kKernels };

  const uint64_t id = next_id();  // unlike an address, never another cache's later on
  CacheOptions options;
  const kernels::Entry* entry = nullptr;
  MemoryBudget budget;
  std::vector<int64_t> floors;                        // per group: blocks it always has
  std::vector<std::unique_ptr<Arena>> arenas;         // per group
  std::vector<std::unique_ptr<ArenaSource>> sources;  // per group
  std::unique_ptr<Mover> mover;
  std::unique_ptr<CacheCore> core;
  Key descriptor{};
  std::vector<LayerPlace> layers;                        // by model layer
  std::vector<std::vector<kernels::LayerStore>> stores;  // by group, by index in it
  kernels::AppendCounters append_counters;
  std::vector<ProductPaths> paths;  // per group
  std::atomic<int64_t> calls[kKernels] = {};
  mutable int64_t dense_materializations = 0, dequantized_rows = 0;
  std::unique_ptr<StepPlan::Impl>
      spare;      // of the last ended step, to be filled again: no allocation in a steady state
  Orders orders;  // of the last start()

  void take_back(std::unique_ptr<StepPlan::Impl> plan) override {
    if (plan->arrays.step != 0) core->abandon(plan->arrays);
    spare = std::move(plan);
  }

  static uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return last.fetch_add(1, std::memory_order_relaxed) + 1;
  }
  // Steps of Cache::create.
  Status reserve_arenas(std::vector<GroupDraft> drafts);
  Status open_core();

  Result<LayerPlace> place(int layer) const {
    if (layer >= 0 && size_t(layer) < layers.size() && layers[size_t(layer)].group >= 0)
      return layers[size_t(layer)];
    return invalid_argument(str("[cache] layer ", layer, " is in no group"));
  }
  bool has_group(int group) const {
    const bool known = group >= 0 && group < core->n_groups();
    PKV_REQUIRES(known);
    return known;
  }
  const kernels::LayerStore& store(LayerPlace at) const { return stores[size_t(at.group)][size_t(at.index)]; }
  // num_q_heads: 0: as many as the group has KV heads.
  kernels::AttendShape shape(int group, int64_t num_q_heads) const {
    const GroupSpec& spec = options.groups[size_t(group)];
    return {.num_q_heads = num_q_heads != 0 ? num_q_heads : spec.shape.num_kv_heads,
            .sliding_window = spec.sliding_window,
            .k_codes = paths[size_t(group)].k_codes,
            .v_codes = paths[size_t(group)].v_codes};
  }
  // Ids below this have memory; it moves with growth, so kernels get it per call.
  kernels::LayerStore store_now(LayerPlace at) const {
    kernels::LayerStore layer = store(at);
    layer.num_blocks = core->pool(at.group).end_id();
    return layer;
  }
  LayerAttention attention(const StepPlan::Impl& plan, LayerPlace at, const kernels::AttendShape& shape) const {
    return {store_now(at), plan.batch(size_t(at.group)), shape, plan.work[size_t(at.group)], *entry};
  }
  Result<Started> start(std::span<const int32_t> prompt, std::string_view name_space, std::span<const Key> keys,
                        const StartOptions& start_options);
  Result<kernels::AttendCall> attend_call(const AttendArgs& args, Part part) const;
  // Rows of positions [first, length) as floats. Errors: kInvalidArgument when the table has given one back.
  Status decode(LayerPlace at, std::span<const int32_t> table, int64_t first, int64_t length, const DenseRows& k,
                const DenseRows& v) const;
  Status check_plan(const StepPlan::Impl& plan) const {
    if (plan.owner != id || (!plan.read_only && plan.arrays.step == 0))
      return invalid_argument("[cache] the plan is of another cache, was moved from, or its step has ended");
    return plan.read_only ? core->check_current(plan.arrays) : Status();
  }
  Status check_step(const StepPlan::Impl& plan) const {
    return plan.read_only ? invalid_argument("[cache] the plan only reads") : check_plan(plan);
  }
  void plan_group_work(StepPlan::Impl& plan) const {
    plan.work.resize(options.groups.size());
    for (size_t g = 0; g < plan.work.size(); ++g)
      kernels::plan_work(plan.batch(g), options.groups[g].sliding_window, options.groups[g].shape.num_kv_heads,
                         plan.work[g]);
  }
};

}  // namespace pagedkv
