// Which tokens a step takes: one of every answer, then chunks of prompts, the oldest first. Numbers alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pagedkv/units.h"

namespace pagedkv::engine {

// What a step takes of one sequence.
struct Share {
  size_t sequence = 0;  // its place among those that run
  int64_t n_tokens = 0;
};

// One thread.
class Batcher {
 public:
  // max_step_seconds: of a step that lets an answer grow, as far as the last steps tell; 0: no bound.
  Batcher(Tokens max_step_tokens, double max_step_seconds);

  // The next step of those that run.
  //   pending  [sequences] tokens that are not computed yet, in the order of admission; 1: an answer that grows
  // Requires: each at least 1.
  std::vector<Share> choose(std::span<const int64_t> pending);
  // What that step took, for the size of the next chunks.
  void learn(std::span<const Share> step, double seconds);

 private:
  const int64_t max_tokens_;
  const double max_seconds_;
  double seconds_per_prompt_token_ = 0, decode_seconds_ = 0;  // averages; 0: not known yet
  size_t first_answer_ = 0;  // where the next step begins, when not all answers fit into one
};

}  // namespace pagedkv::engine
