#include "engine/scheduler.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <unordered_map>
#include <utility>

#include "engine/admission.h"
#include "engine/batch.h"
#include "pagedkv/log.h"

namespace pagedkv::engine {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMaxChoices = 128;
constexpr int64_t kMaxTopLogprobs = 20;
constexpr int64_t kAdmissionWindow = 64;  // waiting requests that are looked at before a step
constexpr auto kPublishEvery = std::chrono::milliseconds(250);
constexpr auto kResidentEvery = std::chrono::seconds(5);
constexpr auto kBlocksWatchedFor = std::chrono::seconds(3);

double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

struct Job;

// One choice of a request: a sequence and the answer that grows on it.
struct Stream {
  Job* job = nullptr;
  int64_t choice = 0;
  std::unique_ptr<Answer> answer;
  std::vector<int32_t> tokens;  // prompt, then what was drawn and is not the end
  int64_t computed = 0;         // leading tokens whose K and V are stored; meaningful while it runs
  SequenceId sequence;
  Clock::time_point last_token;

  int64_t pending() const { return std::ssize(tokens) - computed; }
};

struct Job {
  RequestId id{};  // ascending with arrival
  ServeRequest request;
  std::shared_ptr<RequestSink> sink;
  std::vector<PrefixKey> keys;                   // of the prompt's full blocks
  std::vector<std::unique_ptr<Stream>> streams;  // choice 0 alone until the prompt is computed
  int64_t open = 0;                              // choices that are not finished, those to come included
  int64_t times_passed = 0;
  bool admitted = false, length = false;
  Usage usage;
  Clock::time_point arrived;

  // Choices that will come out of this stream: all of them while the prompt is not computed.
  int64_t slots(const Stream& s) const { return s.choice == 0 ? 1 + request.n - std::ssize(streams) : 1; }
};

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

}  // namespace

struct Scheduler::Impl {
  Impl(StepModel& step_model, const SchedulerOptions& scheduler_options)
      : model(step_model),
        options(scheduler_options),
        cache(step_model.cache()),
        text(step_model.text()),
        batcher(options.max_num_batched_tokens, options.max_step_seconds) {
    figures.cache = cache.stats();
    published = figures;
    capacity = cache.capacity();
    context = model.context();
  }

  // --- what other threads touch, under `mutex` ------------------------------------------------------------------
  StepModel& model;
  const SchedulerOptions options;
  Tokens capacity, context;
  mutable std::mutex mutex;
  std::condition_variable wake;
  std::vector<std::unique_ptr<Job>> arrivals;
  std::vector<RequestId> cancels;
  uint64_t last_id = 0;
  int64_t open_streams = 0;  // accepted and not finished
  int64_t open_requests = 0;
  int64_t refused = 0;
  bool stopping = false;
  Status dead;
  SchedulerStats published;
  mutable Clock::time_point blocks_wanted_until{};
  std::atomic<Clock::rep> step_began{0};  // ticks of the clock; 0: no step runs
  std::thread thread;

  // --- the scheduler's thread alone -----------------------------------------------------------------------------
  Cache& cache;
  const Text& text;
  std::unordered_map<uint64_t, std::unique_ptr<Job>> jobs;
  std::deque<Stream*> waiting;   // in the order of arrival
  std::vector<Stream*> running;  // in the order of admission
  struct End {
    std::shared_ptr<RequestSink> sink;
    Status status;
    Usage usage;
  };
  std::vector<End> ended;  // requests whose sinks have not heard of it
  SchedulerStats figures;
  bool changed = false;  // requests came or ended since the last publish()
  Clock::time_point last_publish{}, last_resident{};
  Batcher batcher;

  int64_t max_choices() const { return std::min(kMaxChoices, options.max_num_seqs); }

  // --- requests -------------------------------------------------------------------------------------------------
  Result<RequestId> submit(ServeRequest request, std::shared_ptr<RequestSink> sink) {
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
    auto answer = Answer::begin(text, request.prompt, context, request.answer);
    if (!answer.ok()) return answer.status();

    auto job = std::make_unique<Job>();
    job->open = request.n;
    job->usage.prompt_tokens = std::ssize(request.prompt);
    job->arrived = Clock::now();
    job->sink = std::move(sink);
    job->streams.push_back(std::make_unique<Stream>());
    job->streams[0]->job = job.get();
    job->streams[0]->answer = std::move(*answer);
    job->streams[0]->tokens = request.prompt;
    job->request = std::move(request);

    const std::lock_guard lock(mutex);
    if (!dead.ok()) return Status(Code::kUnavailable, "the engine has ended: " + dead.message());
    if (stopping) return Status(Code::kUnavailable, "the engine is being stopped");
    if (open_streams + job->request.n > options.max_num_seqs + options.max_queue) {
      ++refused;
      return Status(Code::kCapacity, std::to_string(open_streams) + " sequences run or wait, the limit is " +
                                         std::to_string(options.max_num_seqs + options.max_queue) +
                                         " (max_num_seqs + max_queue)");
    }
    open_streams += job->request.n;
    ++open_requests;
    const RequestId id = job->id = RequestId(++last_id);
    arrivals.push_back(std::move(job));
    wake.notify_one();
    return id;
  }

  void cancel(RequestId id) {
    const std::lock_guard lock(mutex);
    cancels.push_back(id);
    wake.notify_one();
  }

  // --- the loop -------------------------------------------------------------------------------------------------
  void run() {
    try {
      while (take_inbox()) {
        const auto begin = Clock::now();
        admit();
        if (changed) publish(true);  // requests came or went: not only after the step
        tell_ends();
        step();
        figures.busy_seconds += seconds(Clock::now() - begin);
        publish(changed);
        tell_ends();
      }
      end_all(Status(Code::kUnavailable, "the server was stopped"));
    } catch (const std::exception& error) {
      die(error.what());
    } catch (...) {
      die("unknown exception");
    }
  }

  void die(const std::string& why) {
    {
      const std::lock_guard lock(mutex);
      dead = Status(Code::kInternal, why);
    }
    step_began.store(0);
    end_all(Status(Code::kInternal, "the engine has ended: " + why));
  }

  // Waits while there is nothing to do. False: stop.
  bool take_inbox() {
    std::vector<std::unique_ptr<Job>> new_jobs;
    std::vector<RequestId> cancelled;
    {
      std::unique_lock lock(mutex);
      const auto idle = [&] { return running.empty() && waiting.empty() && arrivals.empty() && cancels.empty(); };
      while (idle() && !stopping) {
        lock.unlock();
        publish(true);
        tell_ends();
        lock.lock();
        if (!idle() || stopping) break;
        const bool watched = Clock::now() < blocks_wanted_until;
        if (watched) {
          wake.wait_for(lock, kPublishEvery);
        } else {
          wake.wait(lock);
        }
      }
      if (stopping) return false;
      new_jobs.swap(arrivals);
      cancelled.swap(cancels);
    }
    for (auto& job : new_jobs) {
      job->keys = cache.prefix_keys(job->request.prompt, job->request.name_space);
      waiting.push_back(job->streams[0].get());
      ++figures.requests;
      changed = true;
      jobs.emplace(static_cast<uint64_t>(job->id), std::move(job));
    }
    for (const RequestId id : cancelled)
      if (const auto found = jobs.find(static_cast<uint64_t>(id)); found != jobs.end())
        end(*found->second, Status());
    return true;
  }

  // --- admission ------------------------------------------------------------------------------------------------
  Room room() const {
    const Tokens growth(options.growth.n + cache.options().block_size.n);  // a choice may begin a block of its own
    Room room{.sequences = options.max_num_seqs, .nobody_runs = running.empty(), .growth = growth};
    for (const Stream* s : running) {
      const int64_t choices = s->job->slots(*s);
      room.sequences -= choices;
      room.promised.n += s->pending() + choices * growth.n;
    }
    return room;
  }
  PrefixMatch match(const Stream& s) const {
    return cache.match(s.job->request.prompt, s.job->keys, s.job->request.name_space);
  }
  Tokens soon_cached_of(const Stream& s) const {
    Tokens longest(0);
    for (const Stream* other : running) {
      if (other->choice != 0 || other->computed >= std::ssize(other->job->request.prompt)) continue;
      longest = std::max(
          longest, soon_cached(s.job->keys, other->job->keys, Tokens(other->computed), cache.options().block_size));
    }
    return longest;
  }

  // In the order of arrival. One that does not fit may be passed by smaller ones, but not for ever; one whose
  // prompt somebody is computing waits for that, and loses nothing by it.
  void admit() {
    const std::vector<Stream*> candidates(
        waiting.begin(), waiting.begin() + std::min<std::ptrdiff_t>(std::ssize(waiting), kAdmissionWindow));
    std::vector<Job*> passed;
    for (Stream* s : candidates) {
      const Room left = room();
      if (left.sequences <= 0) return;
      const PrefixMatch found = match(*s);
      if (soon_cached_of(*s) > found.cached) continue;
      const Verdict verdict = judge(left, {.choices = s->job->slots(*s),
                                           .to_compute = Tokens(std::ssize(s->tokens) - found.cached.n),
                                           .available = cache.available_beside(found),
                                           .times_passed = s->job->times_passed});
      if (verdict == Verdict::kHoldAll) return;
      if (verdict == Verdict::kLetPass) {
        passed.push_back(s->job);
        continue;
      }
      if (!open(*s)) return;  // its request has ended, and those that follow may have been its choices
      for (Job* job : passed) ++job->times_passed;
    }
  }

  // False: it could not be opened, and its request was ended.
  bool open(Stream& s) {
    Job& job = *s.job;
    // What it had before it was preempted is no hit: it was counted when it came.
    auto started =
        cache.start(s.tokens, {.name_space = job.request.name_space, .counted = !job.admitted, .keys = job.keys});
    if (!started.ok()) {
      end(job, started.status());
      return false;
    }
    s.sequence = started->id;
    s.computed = started->reused.n;
    if (!job.admitted) {
      job.admitted = true;
      job.usage.cached_tokens = started->reused.n;
      job.usage.reason = started->reason;
      job.usage.queue_seconds = seconds(Clock::now() - job.arrived);
      figures.prompt_tokens_cached += started->reused.n;
    }
    std::erase(waiting, &s);
    running.push_back(&s);
    return true;
  }

  // --- one step -------------------------------------------------------------------------------------------------
  void step() {
    while (!running.empty()) {
      // As they are now: running changes as answers fork and end.
      const std::vector<Stream*> streams = running;
      std::vector<int64_t> pending;
      for (const Stream* s : streams) pending.push_back(s->pending());
      const std::vector<Share> chosen = batcher.choose(pending);
      std::vector<StepInput> inputs;
      for (const Share& share : chosen) {
        const Stream& s = *streams[share.sequence];
        inputs.push_back({.sequence = s.sequence,
                          .tokens = std::span<const int32_t>(s.tokens).subspan(
                              static_cast<size_t>(s.computed), static_cast<size_t>(share.n_tokens))});
      }
      const auto begin = Clock::now();
      step_began.store(begin.time_since_epoch().count());
      auto out = model.step(inputs);
      step_began.store(0);
      const double took = seconds(Clock::now() - begin);
      figures.model_seconds += took;
      if (out.ok()) {
        ++figures.steps;
        batcher.learn(chosen, took);
        take(streams, chosen, *out);
        return;
      }
      const bool no_room = out.status().code() == Code::kCapacity || out.status().code() == Code::kNoMemory;
      if (no_room && running.size() > 1) {
        preempt();
        continue;
      }
      std::vector<Job*> failed;  // each once
      for (const Share& share : chosen) {
        Job* job = streams[share.sequence]->job;
        if (std::find(failed.begin(), failed.end(), job) == failed.end()) failed.push_back(job);
      }
      for (Job* job : failed) end(*job, out.status());
      return;
    }
  }

  // The youngest sequence gives its blocks back and waits again, before all that came after it.
  void preempt() {
    const auto youngest = std::max_element(running.begin(), running.end(), [](const Stream* a, const Stream* b) {
      return std::pair(a->job->id, a->choice) < std::pair(b->job->id, b->choice);
    });
    Stream* s = *youngest;
    running.erase(youngest);
    static_cast<void>(cache.release(s->sequence));
    s->computed = 0;
    ++s->job->usage.preemptions;
    ++figures.preemptions;
    const auto place = std::find_if(waiting.begin(), waiting.end(),
                                    [&](const Stream* other) { return other->job->id > s->job->id; });
    waiting.insert(place, s);
  }

  void take(const std::vector<Stream*>& streams, const std::vector<Share>& chosen, const StepOutput& out) {
    const auto vocab = static_cast<size_t>(text.vocab_size());
    const auto now = Clock::now();
    std::vector<Job*> owners;  // of the chosen: a request that fails takes its other choices with it
    for (const Share& share : chosen) owners.push_back(streams[share.sequence]->job);
    std::vector<Job*> gone;
    for (size_t i = 0; i < chosen.size(); ++i) {
      Job& job = *owners[i];
      if (std::find(gone.begin(), gone.end(), &job) != gone.end()) continue;
      Status status = out.statuses[i];
      if (status.ok()) {
        const auto row = static_cast<size_t>(out.first_row[i]) * vocab;
        status = go_on(*streams[chosen[i].sequence], chosen[i].n_tokens, out.logits, row, vocab, now);
      }
      if (status.ok()) continue;
      gone.push_back(&job);
      end(job, status);
    }
  }

  // The rows of a stream's tokens are stored: its answers grow once the last one is. Whatever goes wrong is this
  // request's alone.
  Status go_on(Stream& s, int64_t n_tokens, std::span<const float> logits, size_t row, size_t vocab,
               Clock::time_point now) {
    const int64_t n_prompt = std::ssize(s.job->request.prompt);
    figures.prompt_tokens_computed += std::max<int64_t>(0, std::min(n_tokens, n_prompt - s.computed));
    s.computed += n_tokens;
    if (s.pending() > 0) return Status();
    try {
      // The other choices begin here: they share the blocks of the prompt.
      std::vector<Stream*> grown{&s};
      while (s.choice == 0 && std::ssize(s.job->streams) < s.job->request.n) {
        auto forked = fork(s);
        if (!forked.ok()) return forked.status();
        grown.push_back(*forked);
      }
      for (Stream* stream : grown)
        if (Status status = grow(*stream, logits.subspan(row, vocab), now); !status.ok()) return status;
      return Status();
    } catch (const std::bad_alloc&) {
      return Status(Code::kNoMemory, "no memory for the answer");
    } catch (const std::exception& error) {
      return Status(Code::kInternal, std::string("the answer could not go on: ") + error.what());
    }
  }

  Result<Stream*> fork(Stream& first) {
    Job& job = *first.job;
    auto stream = std::make_unique<Stream>();
    AnswerOptions options_of = job.request.answer;
    options_of.sampling.seed += job.streams.size();
    auto answer = Answer::begin(text, job.request.prompt, context, options_of);
    if (!answer.ok()) return answer.status();
    stream->answer = std::move(*answer);
    job.streams.reserve(job.streams.size() + 1);
    running.reserve(running.size() + 1);
    auto sequence = cache.fork(first.sequence);
    if (!sequence.ok()) return sequence.status();
    stream->sequence = *sequence;
    stream->job = &job;
    stream->choice = std::ssize(job.streams);
    stream->tokens = first.tokens;
    stream->computed = first.computed;
    running.push_back(stream.get());
    job.streams.push_back(std::move(stream));
    return running.back();
  }

  // Draws the stream's next token. Destroys the stream's job with its last choice, and then nothing fails any more.
  Status grow(Stream& s, std::span<const float> logits, Clock::time_point now) {
    Job& job = *s.job;
    const auto before = s.answer->tokens().size();
    auto drawn = s.answer->grow(logits);
    if (!drawn.ok()) return drawn.status();
    Answer::Grown& grown = *drawn;
    const bool counts = s.answer->tokens().size() > before;  // else it is the token that ends the answer
    job.usage.completion_tokens += counts;
    figures.generated_tokens += counts;
    if (std::ssize(s.tokens) == std::ssize(job.request.prompt)) {  // its first
      if (s.choice == 0) {
        job.usage.first_token_seconds = seconds(now - job.arrived);
        figures.first_token_seconds.add(job.usage.first_token_seconds);
      }
    } else {
      figures.between_tokens_seconds.add(seconds(now - s.last_token));
    }
    s.last_token = now;
    s.tokens.push_back(grown.token);

    Delta delta{.choice = s.choice, .text = std::move(grown.text), .tokens = {}, .finish = grown.finish};
    if (job.request.top_logprobs >= 0 && counts)
      delta.tokens.push_back(scores_of(logits, grown.token, job.request.top_logprobs));
    const bool said = !delta.text.empty() || !delta.tokens.empty() || delta.finish;
    if (said) job.sink->on_delta(std::move(delta));
    if (!grown.finish) return Status();
    job.length |= *grown.finish == FinishReason::kLength;
    leave(s);
    {
      const std::lock_guard lock(mutex);
      --open_streams;
    }
    if (--job.open == 0) finish(job, Status(), job.length ? figures.finished_length : figures.finished_stop);
    return Status();
  }

  // --- ends -----------------------------------------------------------------------------------------------------
  void leave(Stream& s) {
    std::erase(waiting, &s);
    if (std::erase(running, &s) > 0) static_cast<void>(cache.release(s.sequence));
  }

  // The request ends before its choices do. An ok status: it was cancelled.
  void end(Job& job, const Status& status) {
    for (const auto& stream : job.streams) leave(*stream);
    {
      const std::lock_guard lock(mutex);
      open_streams -= job.open;
    }
    finish(job, status, status.ok() ? figures.cancelled : figures.failed);
  }

  void finish(Job& job, const Status& status, int64_t& counter) {
    ++counter;
    changed = true;
    job.usage.total_seconds = seconds(Clock::now() - job.arrived);
    figures.request_seconds.add(job.usage.total_seconds);
    ended.push_back({std::move(job.sink), status, job.usage});
    jobs.erase(static_cast<uint64_t>(job.id));
  }

  // Ends are told once the published figures hold them: who asks for figures then finds his request in them.
  void tell_ends() {
    if (ended.empty()) return;
    std::vector<End> told;
    told.swap(ended);
    {
      const std::lock_guard lock(mutex);
      open_requests -= std::ssize(told);
    }
    for (const End& end : told) tell(*end.sink, end.status, end.usage);
  }
  static void tell(RequestSink& sink, const Status& status, const Usage& usage) {
    try {
      sink.on_end(status, usage);
    } catch (const std::exception& error) {  // it has no other way to hear of anything
      notice(std::string("[scheduler] the end of a request could not be told: ") + error.what());
    }
  }

  void end_all(const Status& status) {
    std::vector<std::unique_ptr<Job>> not_begun;
    {
      const std::lock_guard lock(mutex);
      not_begun.swap(arrivals);
      for (const auto& job : not_begun) open_streams -= job->open;
      open_requests -= std::ssize(not_begun);
    }
    for (const auto& job : not_begun) tell(*job->sink, status, job->usage);
    while (!jobs.empty()) end(*jobs.begin()->second, status);
    publish(true);
    tell_ends();
  }

  // --- figures --------------------------------------------------------------------------------------------------
  void publish(bool at_once) {
    const auto now = Clock::now();
    if (!at_once && now - last_publish < kPublishEvery) return;
    last_publish = now;
    changed = false;
    const int64_t resident = figures.cache.bytes_resident;
    const bool look = now - last_resident >= kResidentEvery;
    figures.cache = cache.stats(look);
    if (look) {
      last_resident = now;
    } else {
      figures.cache.bytes_resident = resident;
    }
    figures.running = std::ssize(running);
    figures.waiting = std::ssize(waiting);
    bool watched;
    {
      const std::lock_guard lock(mutex);
      watched = now < blocks_wanted_until;
    }
    figures.blocks = watched ? cache.block_views() : Cache::BlockViews();
    const std::lock_guard lock(mutex);
    published = figures;
  }

  SchedulerStats stats(bool with_blocks) {
    const auto now = Clock::now();
    const std::lock_guard lock(mutex);
    if (with_blocks) {
      if (now >= blocks_wanted_until) wake.notify_one();
      blocks_wanted_until = now + kBlocksWatchedFor;
    }
    SchedulerStats copy = published;
    copy.refused = refused;
    copy.waiting += std::ssize(arrivals);
    if (const auto began = step_began.load(); began != 0)
      copy.seconds_in_step = seconds(now.time_since_epoch() - Clock::duration(began));
    return copy;
  }

  void stop() {
    {
      const std::lock_guard lock(mutex);
      stopping = true;
      wake.notify_one();
    }
    if (thread.joinable()) thread.join();
  }
};

Scheduler::Scheduler(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Scheduler::~Scheduler() { stop(); }

Result<std::unique_ptr<Scheduler>> Scheduler::start(StepModel& model, const SchedulerOptions& options) {
  if (Status s = check(options); !s.ok()) return s;
  auto impl = std::make_unique<Impl>(model, options);
  Impl* loop = impl.get();
  impl->thread = std::thread([loop] { loop->run(); });
  return std::unique_ptr<Scheduler>(new Scheduler(std::move(impl)));
}

Result<RequestId> Scheduler::submit(ServeRequest request, std::shared_ptr<RequestSink> sink) {
  return impl_->submit(std::move(request), std::move(sink));
}
void Scheduler::cancel(RequestId request) { impl_->cancel(request); }
void Scheduler::stop() { impl_->stop(); }
SchedulerStats Scheduler::stats(bool with_blocks) const { return impl_->stats(with_blocks); }
Status Scheduler::health() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->dead;
}
int64_t Scheduler::open_requests() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->open_requests;
}
const SchedulerOptions& Scheduler::options() const { return impl_->options; }
int64_t Scheduler::max_choices() const { return impl_->max_choices(); }

}  // namespace pagedkv::engine
