// What runs one step of several sequences: Engine, and in tests a script.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/text.h"
#include "pagedkv/cache.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv::engine {

// New tokens of one sequence in a step.
struct StepInput {
  SequenceId sequence;
  std::span<const int32_t> tokens;
  bool all_logits = false;  // logits of every token instead of the last one only
};

struct StepOutput {
  std::span<const float> logits;   // [rows, vocab_size] in input order; valid until the next step
  std::vector<int64_t> first_row;  // per input: index of its first row of logits
  std::vector<Status> statuses;    // per input: not ok when its rows were rejected (kNotFinite)
};

class TierTraffic;

// One thread, but for text().
class StepModel {
 public:
  virtual ~StepModel() = default;
  virtual const Text& text() const = 0;  // its const members: any thread
  virtual Cache& cache() = 0;
  virtual Tokens context() const = 0;              // longest sequence
  virtual TierTraffic* tier() { return nullptr; }  // where its cache's blocks go besides; null: nowhere
  // One pass of the model over new tokens of several sequences: reserve -> plan -> layers -> commit.
  // Errors: kCapacity, kStale, kInvalidArgument; nothing was changed.
  virtual Result<StepOutput> step(std::span<const StepInput> inputs) = 0;
};

}  // namespace pagedkv::engine
