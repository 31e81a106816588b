// Many requests on one model and one pool of blocks: continuous batching.
//
// One thread, the scheduler's own, runs the steps and alone touches model and cache. Each step takes one token of
// every answer in progress and fills up with chunks of prompts. Requests that do not fit wait; when the pool is
// full the youngest sequence gives its blocks back and is computed again later. None is ended for lack of room.
#pragma once

#include <cstdint>
#include <memory>

#include "engine/figures.h"
#include "engine/request.h"
#include "engine/step_model.h"
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
