#include "api/step_plan.h"

namespace pagedkv {

StepPlan::StepPlan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StepPlan::StepPlan(StepPlan&&) noexcept = default;
StepPlan& StepPlan::operator=(StepPlan&&) noexcept = default;
StepPlan::~StepPlan() = default;

int64_t StepPlan::n_sequences() const { return int64_t(impl_->arrays.sequences.size()); }
int64_t StepPlan::n_tokens() const { return int64_t(impl_->arrays.positions.size()); }
std::span<const int32_t> StepPlan::seq_lens() const { return impl_->arrays.seq_lens; }
std::span<const int32_t> StepPlan::query_start_loc() const { return impl_->arrays.query_start_loc; }
std::span<const int32_t> StepPlan::positions() const { return impl_->arrays.positions; }

GroupPlan StepPlan::group(int group) const {
  const StepArrays::Group& g = impl_->arrays.groups[size_t(group)];
  return {g.max_blocks, g.block_tables, g.slot_mapping};
}

}  // namespace pagedkv
