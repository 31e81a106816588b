// The scheduler's figures: counters, times and the cache's own.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/tier_figures.h"
#include "pagedkv/cache.h"
#include "pagedkv/stats.h"

namespace pagedkv::engine {

// Counts of values up to each bound, and above the last one.
struct Histogram {
  explicit Histogram(std::vector<double> upper_bounds);
  std::vector<double> bounds;   // ascending
  std::vector<int64_t> counts;  // [bounds + 1]
  double sum = 0;
  void add(double value);
};

struct SchedulerStats {
  Stats cache;            // bytes_resident is brought up to date every few seconds
  BlockViews blocks;      // of group 0; only while somebody looks (see Scheduler::stats)
  int64_t running = 0;    // sequences
  int64_t waiting = 0;    // sequences
  int64_t restoring = 0;  // sequences whose prompts' beginnings are being read from the tier
  int64_t requests = 0;   // accepted since the start
  int64_t refused = 0;    // the queue was full
  int64_t finished_stop = 0, finished_length = 0, cancelled = 0, failed = 0;  // requests
  int64_t preemptions = 0;
  int64_t prompt_tokens_computed = 0;  // again after a preemption: counted again
  int64_t prompt_tokens_cached = 0;
  int64_t generated_tokens = 0;
  int64_t steps = 0;
  double busy_seconds = 0;     // of the loop, while there was work
  double model_seconds = 0;    // of them inside the model
  double seconds_in_step = 0;  // of the step that runs now; 0: none
  std::optional<TierFigures> tier = std::nullopt;
  Histogram first_token_seconds{{.01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 50, 100}};
  Histogram between_tokens_seconds{{.005, .01, .02, .03, .05, .075, .1, .15, .2, .3, .5, 1, 2, 5}};
  Histogram request_seconds{{.1, .2, .5, 1, 2, 5, 10, 20, 50, 100, 200, 500}};
};

// The scheduler's own figures by name, as the server's /stats and LLM.stats() of Python have them.
std::vector<std::pair<const char*, int64_t>> named_counts(const SchedulerStats& stats);
std::vector<std::pair<const char*, double>> named_seconds(const SchedulerStats& stats);
// Likewise, of the tier.
std::vector<std::pair<const char*, int64_t>> named_counts(const TierFigures& figures);

}  // namespace pagedkv::engine
