// Runs requests together, step by step: who waits is admitted, a step is made, answers grow and end. This is the
// one place where an answer grows: a server drives it from a thread of its own (scheduler.h), a single call from
// the caller's (Engine::generate).
//
//   loop.accept(std::move(job));
//   while (loop.has_work()) {
//     loop.admit();
//     loop.step();
//     for (Loop::End& end : loop.take_ends()) ...
//   }
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/batch.h"
#include "engine/clock.h"
#include "engine/figures.h"
#include "engine/job.h"
#include "engine/scheduler.h"
#include "engine/step_model.h"
#include "engine/tier_traffic.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

// One thread, but for seconds_in_step().
class Loop {
 public:
  // `model` must outlive it; nobody else uses it meanwhile, but for text(). max_queue is not looked at.
  Loop(StepModel& model, const SchedulerOptions& options);
  ~Loop();  // gives back what still runs; nobody is told

  void accept(std::unique_ptr<Job> job);  // ids ascend
  void cancel(RequestId request);         // one that has ended already is left alone
  void end_all(const Status& status);

  bool has_work() const { return !running_.empty() || !restoring_.empty() || !waiting_.empty(); }
  // In the order of arrival. One that does not fit may be passed by smaller ones, but not for ever; one whose
  // prompt somebody is computing waits for that, and loses nothing by it.
  void admit();
  // One step of those that run. What goes wrong in it ends the requests that it hits. Throws what the model throws.
  // If nobody runs, but somebody will as soon as the tier has answered, that is awaited for a moment.
  void step();

  // While there is no work: lets go what the tier is done with. True: it is not done with all.
  bool settle();

  // Requests that have ended; their sinks have not heard of it. An ok status without a finish: cancelled.
  struct End {
    std::unique_ptr<Job> job;
    Status status;
  };
  bool has_ends() const { return !ends_.empty(); }
  std::vector<End> take_ends();

  int64_t open_choices() const { return open_choices_; }  // not finished, those to come included
  SchedulerStats figures() const;  // what the loop counts: not the cache's, nor the time of who drives it
  double seconds_in_step() const;  // of the step that runs now; 0: none. Any thread

 private:
  Tokens soon_cached_of(const Stream& s) const;
  bool begin_restore(Stream& s);
  void end_restores();
  bool open(Stream& s);
  bool make_room();
  void take(const std::vector<Stream*>& streams, std::span<const Share> shares, const StepOutput& out);
  Status go_on(Stream& s, int64_t n_tokens, std::span<const float> logits, Clock::time_point now);
  Result<Stream*> fork(Stream& first);
  Status grow(Stream& s, std::span<const float> logits, Clock::time_point now);
  void preempt();
  void leave(Stream& s);
  void end(Job& job, const Status& status);
  void finish(Job& job, const Status& status, int64_t& counter);

  StepModel& model_;
  const SchedulerOptions options_;
  Cache& cache_;
  const Text& text_;
  TierTraffic* const tier_;  // or null
  Batcher batcher_;
  std::unordered_map<RequestId, std::unique_ptr<Job>> jobs_;
  std::deque<Stream*> waiting_;     // in the order of arrival
  std::vector<Stream*> restoring_;  // admitted; their prompts' beginnings are being read back
  std::vector<Stream*> running_;    // in the order of admission
  std::vector<End> ends_;
  int64_t open_choices_ = 0;
  SchedulerStats figures_;
  std::atomic<Clock::rep> step_began_{0};  // ticks of the clock; 0: no step runs
};

}  // namespace pagedkv::engine
