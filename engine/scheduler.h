// Many requests on one model and one pool of blocks: continuous batching.
//
// One thread, the scheduler's own, runs the steps and alone touches model and cache. Each step takes one token of
// every answer in progress and fills up with chunks of prompts. Requests that do not fit wait; when the pool is
// full the youngest sequence gives its blocks back and is computed again later. None is ended for lack of room.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/answer.h"
#include "engine/step_model.h"
#include "pagedkv/cache.h"
#include "pagedkv/stats.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv::engine {

struct SchedulerOptions {
  int64_t max_num_seqs = 32;  // sequences that run at once. Larger: more tokens a second, each answer slower
  Tokens max_num_batched_tokens{512};  // most tokens of a step. Larger: prompts are faster, steps longer
  int64_t max_queue = 128;             // sequences that wait beyond those that run; the next request is refused
  // While answers are being generated, chunks of prompts shrink so that a step takes no longer than this, as far as
  // the last steps tell. Larger: prompts are faster, answers stutter more. 0: no bound.
  double max_step_seconds = 0.2;
  Tokens growth{64};  // room each running answer keeps when another request is admitted. Larger: fewer preemptions
};

struct ServeRequest {
  std::vector<int32_t> prompt;
  AnswerOptions answer = {};    // seed: of choice 0; choice i has seed + i, after 2^64 - 1 comes 0
  int64_t n = 1;                // choices; they share the prompt's blocks
  int64_t top_logprobs = -1;    // alternatives to report with each token, 0 to 20; < 0: no log-probabilities at all
  std::string name_space = {};  // prompts of different namespaces never share blocks
};

// A log-probability of the model's own distribution, before penalties, bias, temperature and grammar.
struct TokenScore {
  int32_t token = -1;
  float logprob = 0;
};
struct ScoredToken {
  TokenScore drawn;
  std::vector<TokenScore> top;  // likeliest first
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

// Counts of values up to each bound, and above the last one.
struct Histogram {
  std::vector<double> bounds;   // ascending
  std::vector<int64_t> counts;  // [bounds + 1]
  double sum = 0;
  void add(double value);
};

struct SchedulerStats {
  Stats cache;           // bytes_resident is brought up to date every few seconds
  BlockViews blocks;     // of group 0; only while somebody looks (see Scheduler::stats)
  int64_t running = 0;   // sequences
  int64_t waiting = 0;   // sequences
  int64_t requests = 0;  // accepted since the start
  int64_t refused = 0;   // the queue was full
  int64_t finished_stop = 0, finished_length = 0, cancelled = 0, failed = 0;  // requests
  int64_t preemptions = 0;
  int64_t prompt_tokens_computed = 0;  // again after a preemption: counted again
  int64_t prompt_tokens_cached = 0;
  int64_t generated_tokens = 0;
  int64_t steps = 0;
  double busy_seconds = 0;     // of the loop, while there was work
  double model_seconds = 0;    // of them inside the model
  double seconds_in_step = 0;  // of the step that runs now; 0: none
  Histogram first_token_seconds, between_tokens_seconds, request_seconds;
};

// The scheduler's own figures by name, as the server's /stats and LLM.stats() of Python have them.
std::vector<std::pair<const char*, int64_t>> named_counts(const SchedulerStats& stats);
std::vector<std::pair<const char*, double>> named_seconds(const SchedulerStats& stats);

class Scheduler {
 public:
  // `model` must outlive it; nobody else uses it meanwhile, but for text(). Starts the thread.
  // Errors: kInvalidArgument.
  static Result<std::unique_ptr<Scheduler>> start(StepModel& model, const SchedulerOptions& options);
  ~Scheduler();  // stop()

  // Any thread. `sink` lives until its on_end. Errors: kInvalidArgument (prompt, sampling, n, logprobs),
  // kCapacity (the queue is full), kUnavailable (stopped, or the engine's thread has ended; the message says why).
  Result<RequestId> submit(ServeRequest request, std::shared_ptr<RequestSink> sink);
  // Any thread. Ends the request before the next step; one that has ended already is left alone.
  void cancel(RequestId request);
  // Any thread. Ends all requests with kUnavailable and joins the thread.
  void stop();

  // Any thread. As of the last time that a request came or ended, or a quarter of a second ago at most.
  // `with_blocks`: also the state of each block, from the next step on and as long as somebody asks every few
  // seconds.
  SchedulerStats stats(bool with_blocks = false) const;
  // Not ok: the engine's thread has ended, and why.
  Status health() const;
  int64_t open_requests() const;
  const SchedulerOptions& options() const;
  int64_t max_choices() const;  // largest n of a request

 private:
  struct Impl;
  explicit Scheduler(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv::engine
