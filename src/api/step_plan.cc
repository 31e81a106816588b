#include "api/step_plan.h"

#include "base/check.h"

namespace pagedkv {

StepPlan::StepPlan(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
StepPlan::StepPlan(StepPlan&&) noexcept = default;
StepPlan::~StepPlan() { abandon(); }

StepPlan& StepPlan::operator=(StepPlan&& other) noexcept {
  if (this == &other) return *this;
  abandon();
  impl_ = std::move(other.impl_);
  return *this;
}

void StepPlan::abandon() {
  const std::shared_ptr<Impl::Home> home = impl_ ? impl_->home.lock() : nullptr;
  if (home) home->take_back(std::move(impl_));
  impl_.reset();
}

// A plan that was moved from reads as an empty one that has ended.
const StepPlan::Impl& StepPlan::impl() const {
  static const Impl ended;
  return impl_ ? *impl_ : ended;
}

int64_t StepPlan::n_sequences() const { return int64_t(impl().arrays.sequences.size()); }
int64_t StepPlan::n_tokens() const { return int64_t(impl().arrays.positions.size()); }
std::span<const int32_t> StepPlan::seq_lens() const { return impl().arrays.seq_lens; }
std::span<const int32_t> StepPlan::query_start_loc() const { return impl().arrays.query_start_loc; }
std::span<const int32_t> StepPlan::positions() const { return impl().arrays.positions; }

GroupPlan StepPlan::group(int group) const {
  const auto& groups = impl().arrays.groups;
  const bool known = group >= 0 && size_t(group) < groups.size();
  PKV_REQUIRES(known);
  if (!known) return {};
  const StepArrays::Group& g = groups[size_t(group)];
  return {g.max_blocks, g.block_tables, g.slot_mapping};
}

}  // namespace pagedkv
