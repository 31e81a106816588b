// What is asked of the scheduler, and what comes back of it: the values that cross its border.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/answer.h"
#include "engine/scores.h"
#include "pagedkv/cache.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

struct ServeRequest {
  std::vector<int32_t> prompt;
  AnswerOptions answer = {};    // seed: of choice 0; choice i has seed + i, after 2^64 - 1 comes 0
  int64_t n = 1;                // choices; they share the prompt's blocks
  int64_t top_logprobs = -1;    // alternatives to report with each token, 0 to 20; < 0: no log-probabilities at all
  std::string name_space = {};  // prompts of different namespaces never share blocks
};

// What one step added to one choice.
struct Delta {
  int64_t choice = 0;
  std::string text;
  std::vector<ScoredToken> tokens;  // those drawn in this step; empty unless asked for
  std::optional<FinishReason> finish;
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;                 // of the prompt, taken from the cache
  PrefixReason reason = PrefixReason::kNew;  // why not more
  int64_t completion_tokens = 0;             // of all choices
  int64_t preemptions = 0;
  double queue_seconds = 0;        // until it was admitted
  double first_token_seconds = 0;  // until the first token; 0: there was none
  double total_seconds = 0;
};

// Gets what a request generates. Called on the scheduler's thread, one call at a time; must not block.
class RequestSink {
 public:
  virtual ~RequestSink() = default;
  virtual void on_delta(Delta delta) = 0;
  // The last call; Scheduler::stats() holds the request by then. Not ok: the request failed (kInvalidArgument: no
  // token fits its grammar; kCapacity, kNoMemory, kNotFinite, kUnavailable, kInternal). A request that was
  // cancelled ends ok; its choices had no finish.
  virtual void on_end(const Status& status, const Usage& usage) = 0;
};

enum class RequestId : uint64_t {};

}  // namespace pagedkv::engine
