#include "engine/figures.h"

#include <algorithm>

namespace pagedkv::engine {

Histogram::Histogram(std::vector<double> upper_bounds)
    : bounds(std::move(upper_bounds)), counts(bounds.size() + 1) {}

void Histogram::add(double value) {
  const auto at = std::lower_bound(bounds.begin(), bounds.end(), value) - bounds.begin();
  ++counts[size_t(at)];
  sum += value;
}

std::vector<std::pair<const char*, int64_t>> named_counts(const SchedulerStats& s) {
  return {{"running", s.running},
          {"waiting", s.waiting},
          {"restoring", s.restoring},
          {"requests", s.requests},
          {"refused", s.refused},
          {"finished_stop", s.finished_stop},
          {"finished_length", s.finished_length},
          {"cancelled", s.cancelled},
          {"failed", s.failed},
          {"preemptions", s.preemptions},
          {"prompt_tokens_computed", s.prompt_tokens_computed},
          {"prompt_tokens_cached", s.prompt_tokens_cached},
          {"generated_tokens", s.generated_tokens},
          {"steps", s.steps}};
}

std::vector<std::pair<const char*, int64_t>> named_counts(const TierFigures& f) {
  return {{"waiting_blocks", f.waiting_blocks},
          {"skipped_closed", f.skipped_closed},
          {"skipped_queue", f.skipped_queue},
          {"skipped_gave_way", f.skipped_gave_way},
          {"lookups", f.lookups},
          {"restores", f.restores},
          {"restored_tokens", f.restored_tokens},
          {"restored_bytes", f.restored_bytes},
          {"not_short", f.not_short},
          {"not_faster", f.not_faster},
          {"not_room", f.not_room},
          {"not_late", f.not_late}};
}

std::vector<std::pair<const char*, double>> named_seconds(const SchedulerStats& s) {
  return {
      {"busy_seconds", s.busy_seconds}, {"model_seconds", s.model_seconds}, {"seconds_in_step", s.seconds_in_step}};
}

}  // namespace pagedkv::engine
