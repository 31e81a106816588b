#include "engine/scheduler.h"

#include <algorithm>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "engine/board.h"
#include "engine/inbox.h"
#include "engine/loop.h"
#include "pagedkv/log.h"

namespace pagedkv::engine {
namespace {

constexpr int64_t kMaxChoices = 128;
constexpr int64_t kMaxTopLogprobs = 20;
constexpr auto kWatchEvery =
    std::chrono::milliseconds(250);  // while nothing runs and somebody looks at blocks, or the tier has some

Status check(const SchedulerOptions& o) {
  const auto refuse = [](const char* what, auto value, const char* limit) {
    return invalid_argument("[scheduler] " + std::string(what) + " is " + std::to_string(value) + ", " + limit);
  };
  if (o.max_num_seqs < 1 || o.max_num_seqs > 4096)
    return refuse("max_num_seqs", o.max_num_seqs, "expected 1 to 4096");
  if (o.max_num_batched_tokens.n < o.max_num_seqs || o.max_num_batched_tokens.n > 65536)
    return refuse("max_num_batched_tokens", o.max_num_batched_tokens.n, "expected max_num_seqs to 65536");
  if (o.max_queue < 0 || o.max_queue > 1000000) return refuse("max_queue", o.max_queue, "expected 0 to 1000000");
  if (!(o.max_step_seconds >= 0)) return refuse("max_step_seconds", o.max_step_seconds, "expected 0 or more");
  if (o.growth.n < 0) return refuse("growth", o.growth.n, "expected 0 or more");
  return Status();
}

void tell(const Job& job, const Status& status) {
  try {
    job.sink->on_end(status, job.usage);
  } catch (const std::exception& error) {  // it has no other way to hear of anything
    notice(std::string("[scheduler] the end of a request could not be told: ") + error.what());
  }
}

}  // namespace

struct Scheduler::Impl {
  Impl(StepModel& model, const SchedulerOptions& scheduler_options)
      : options(scheduler_options),
        text(model.text()),
        context(model.context()),
        capacity(model.cache().capacity()),
        cache(model.cache()),
        inbox(options.max_num_seqs, options.max_queue),
        loop(model, options) {
    publish();
  }

  const SchedulerOptions options;
  const Text& text;
  const Tokens context, capacity;
  const Cache& cache;  // of the thread, as is the loop but for seconds_in_step()
  Inbox inbox;
  Board board;
  Loop loop;
  double busy_seconds = 0;
  std::thread thread;

  int64_t max_choices() const { return std::min(kMaxChoices, options.max_num_seqs); }

  // Any thread.
  Status check(const ServeRequest& request) const {
    if (Status s = check_prompt(request.prompt, context, text.vocab_size()); !s.ok()) return s;
    const int64_t most = max_choices();
    if (request.n < 1 || request.n > most)
      return invalid_argument("n is " + std::to_string(request.n) + ", allowed are 1 to " + std::to_string(most));
    if (request.top_logprobs > kMaxTopLogprobs) {
      return invalid_argument("top_logprobs is " + std::to_string(request.top_logprobs) + ", allowed are 0 to " +
                              std::to_string(kMaxTopLogprobs));
    }
    // The whole pool for itself would not do. With capacity() >= context() this cannot happen.
    if (std::ssize(request.prompt) + 1 > capacity.n) {
      return invalid_argument("the prompt needs " + std::to_string(request.prompt.size() + 1) +
                              " tokens of the cache, it has " + std::to_string(capacity.n));
    }
    return Status();
  }

  // --- the scheduler's thread -----------------------------------------------------------------------------------
  void run() {
    try {
      for (;;) {
        await_work();
        Inbox::Mail mail = inbox.take();
        if (mail.stop) return end_all(Status(Code::kUnavailable, "the server was stopped"), mail.jobs);
        const auto begin = Clock::now();
        const bool came = !mail.jobs.empty();
        for (auto& job : mail.jobs) loop.accept(std::move(job));
        for (const RequestId id : mail.cancels) loop.cancel(id);
        loop.admit();
        if (came || loop.has_ends()) publish();  // not only after the step
        tell_ends();
        loop.step();
        busy_seconds += seconds(Clock::now() - begin);
        if (loop.has_ends() || board.due()) publish();
        tell_ends();
      }
    } catch (const std::exception& error) {
      die(error.what());
    } catch (...) {
      die("unknown exception");
    }
  }

  void await_work() {
    while (!loop.has_work() && inbox.empty()) {
      const bool again = loop.settle() || board.watched();
      publish();
      inbox.wait(again ? std::optional(kWatchEvery) : std::nullopt);
    }
  }

  void die(const std::string& why) {
    inbox.close(Status(Code::kInternal, why));
    end_all(Status(Code::kInternal, "the engine has ended: " + why), inbox.take().jobs);
  }

  // `not_begun`: requests that the loop has not seen.
  void end_all(const Status& status, const std::vector<std::unique_ptr<Job>>& not_begun) {
    loop.end_all(status);
    publish();
    tell_ends();
    inbox.settle(0, std::ssize(not_begun));
    for (const auto& job : not_begun) tell(*job, status);
  }

  void publish() {
    SchedulerStats figures = loop.figures();
    figures.busy_seconds = busy_seconds;
    board.publish(std::move(figures), cache);
  }

  // Ends are told once the published figures hold them: who asks for figures then finds his request in them.
  void tell_ends() {
    const std::vector<Loop::End> ends = loop.take_ends();
    inbox.settle(loop.open_choices(), std::ssize(ends));
    for (const Loop::End& end : ends) tell(*end.job, end.status);
  }
};

Scheduler::Scheduler(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Scheduler::~Scheduler() { stop(); }

Result<std::unique_ptr<Scheduler>> Scheduler::start(StepModel& model, const SchedulerOptions& options) {
  if (Status s = check(options); !s.ok()) return s;
  auto impl = std::make_unique<Impl>(model, options);
  impl->thread = std::thread([scheduler = impl.get()] { scheduler->run(); });
  return std::unique_ptr<Scheduler>(new Scheduler(std::move(impl)));
}

Result<RequestId> Scheduler::submit(ServeRequest request, std::shared_ptr<RequestSink> sink) {
  if (Status s = impl_->check(request); !s.ok()) return s;
  auto job = make_job(impl_->text, impl_->context, std::move(request), std::move(sink));
  if (!job.ok()) return job.status();
  return impl_->inbox.submit(std::move(*job));
}

void Scheduler::cancel(RequestId request) { impl_->inbox.cancel(request); }

void Scheduler::stop() {
  impl_->inbox.stop();
  if (impl_->thread.joinable()) impl_->thread.join();
}

SchedulerStats Scheduler::stats(bool with_blocks) const {
  if (with_blocks && impl_->board.watch()) impl_->inbox.wake();
  SchedulerStats stats = impl_->board.read();
  const Inbox::Counts counts = impl_->inbox.counts();
  stats.refused = counts.refused;
  stats.waiting += counts.arrivals;
  stats.seconds_in_step = impl_->loop.seconds_in_step();
  return stats;
}

Status Scheduler::health() const { return impl_->inbox.health(); }
int64_t Scheduler::open_requests() const { return impl_->inbox.counts().open; }
const SchedulerOptions& Scheduler::options() const { return impl_->options; }
int64_t Scheduler::max_choices() const { return impl_->max_choices(); }

}  // namespace pagedkv::engine
