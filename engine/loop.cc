#include "engine/loop.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "engine/admission.h"

namespace pagedkv::engine {
namespace {

constexpr int64_t kAdmissionWindow = 64;  // waiting sequences that are looked at before a step
constexpr auto kTierMoment = std::chrono::milliseconds(5);

// `growth`: of each choice.
Room room_beside(const std::vector<Stream*>& running, const std::vector<Stream*>& restoring, int64_t max_running,
                 Tokens growth) {
  Room room{.sequences = max_running, .nobody_runs = running.empty() && restoring.empty(), .growth = growth};
  for (const auto* streams : {&running, &restoring})
    for (const Stream* s : *streams) {
      const int64_t choices = s->job->slots(*s);
      room.sequences -= choices;
      room.promised.n += s->pending() + choices * growth.n;
    }
  return room;
}

}  // namespace

Loop::Loop(StepModel& model, const SchedulerOptions& options)
    : model_(model),
      options_(options),
      cache_(model.cache()),
      text_(model.text()),
      tier_(model.tier()),
      batcher_(options.max_num_batched_tokens, options.max_step_seconds) {}

Loop::~Loop() {
  for (const Stream* s : restoring_) tier_->abandon(s->job->restore);
  for (const Stream* s : running_) static_cast<void>(cache_.release(s->sequence));
}

void Loop::accept(std::unique_ptr<Job> job) {
  job->match = cache_.match(job->request.prompt, job->request.name_space);
  if (tier_ != nullptr) job->lookup = tier_->look_up(job->match, job->request.prompt);
  waiting_.push_back(job->streams[0].get());
  open_choices_ += job->open;
  ++figures_.requests;
  const RequestId id = job->id;
  jobs_.emplace(id, std::move(job));
}

void Loop::cancel(RequestId request) {
  if (const auto found = jobs_.find(request); found != jobs_.end()) end(*found->second, Status());
}

// --- admission
// ----------------------------------------------------------------------------------------------------
void Loop::admit() {
  if (tier_ != nullptr) {
    tier_->collect();
    end_restores();
  }
  // A choice may have to begin a block of its own.
  const Tokens growth = options_.growth + cache_.options().block_size;
  const std::vector<Stream*> candidates(
      waiting_.begin(), waiting_.begin() + std::min<std::ptrdiff_t>(std::ssize(waiting_), kAdmissionWindow));
  std::vector<Job*> passed;
  for (Stream* s : candidates) {
    Job& job = *s->job;
    const Room room = room_beside(running_, restoring_, options_.max_num_seqs, growth);
    if (room.sequences <= 0) return;
    job.match = cache_.match(job.request.prompt, std::move(job.match));
    const PrefixMatch& found = job.match;
    if (soon_cached_of(*s) > found.cached || (tier_ != nullptr && tier_->is_awaited(job.lookup))) continue;
    const Verdict verdict = judge(room, {.choices = job.slots(*s),
                                         .to_compute = Tokens(std::ssize(s->tokens)) - found.cached,
                                         .available = cache_.available_beside(found),
                                         .times_passed = job.times_passed});
    if (verdict == Verdict::kHoldAll) return;
    if (verdict == Verdict::kLetPass) {
      passed.push_back(&job);
      continue;
    }
    if (!begin_restore(*s) && !open(*s)) return;  // its request has ended, and those that follow may be its choices
    for (Job* other : passed) ++other->times_passed;
  }
}

// Of what others that run are computing, or reading back, the longest.
Tokens Loop::soon_cached_of(const Stream& s) const {
  Tokens longest(0);
  for (const Stream* other : restoring_)
    longest = std::max(longest, soon_cached(s.job->match.keys, other->job->match.keys, other->job->match.cached,
                                            cache_.options().block_size));
  for (const Stream* other : running_) {
    if (other->choice != 0 || other->computed >= std::ssize(other->job->request.prompt)) continue;
    longest = std::max(longest, soon_cached(s.job->match.keys, other->job->match.keys, Tokens(other->computed),
                                            cache_.options().block_size));
  }
  return longest;
}

// From waiting to restoring. False: the tier has nothing of it that is worth reading.
bool Loop::begin_restore(Stream& s) {
  Job& job = *s.job;
  const auto lookup = std::exchange(job.lookup, nullptr);
  if (lookup == nullptr) return false;
  job.restore = tier_->begin(*lookup, job.match, job.request.prompt);
  if (job.restore == nullptr) return false;
  std::erase(waiting_, &s);
  restoring_.push_back(&s);
  return true;
}

// What has come back is cached, and its request runs; one whose restore is stuck is computed.
void Loop::end_restores() {
  for (Stream* s : std::vector<Stream*>(restoring_)) {
    Job& job = *s->job;
    if (TierTraffic::is_done(*job.restore)) {
      tier_->end(*job.restore);
    } else if (tier_->is_stuck(*job.restore)) {
      tier_->abandon(job.restore);
    } else {
      continue;
    }
    job.restore = nullptr;
    std::erase(restoring_, s);
    job.match = cache_.match(job.request.prompt, std::move(job.match));
    static_cast<void>(open(*s));
  }
}

// Blocks that wait to be written give way before sequences do.
bool Loop::make_room() {
  if (tier_ != nullptr && tier_->give_way()) return true;
  if (running_.size() < 2) return false;
  preempt();
  return true;
}

// From waiting to running. False: that failed, and its request has ended.
bool Loop::open(Stream& s) {
  Job& job = *s.job;
  // What it had before it was preempted is no hit: it was counted when it came.
  const auto started = cache_.start(s.tokens, job.match, {.counted = !job.admitted});
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
    figures_.prompt_tokens_cached += started->reused.n;
  }
  std::erase(waiting_, &s);
  running_.push_back(&s);
  return true;
}

// --- one step
// -----------------------------------------------------------------------------------------------------
void Loop::step() {
  const bool awaits = tier_ != nullptr && running_.empty() && has_work();
  if (awaits) tier_->wait(kTierMoment);
  while (!running_.empty()) {
    const std::vector<Stream*> streams = running_;  // as it is now: answers fork and end
    std::vector<int64_t> pending;
    for (const Stream* s : streams) pending.push_back(s->pending());
    const std::vector<Share> shares = batcher_.choose(pending);
    std::vector<StepInput> inputs;
    for (const Share& share : shares) {
      const Stream& s = *streams[share.sequence];
      const auto first = size_t(s.computed), n = size_t(share.n_tokens);
      inputs.push_back({.sequence = s.sequence, .tokens = std::span(s.tokens).subspan(first, n)});
    }
    const auto begin = Clock::now();
    step_began_.store(begin.time_since_epoch().count());
    auto out = model_.step(inputs);
    step_began_.store(0);
    const double took = seconds(Clock::now() - begin);
    figures_.model_seconds += took;
    if (out.ok()) {
      ++figures_.steps;
      batcher_.learn(shares, took);
      if (tier_ != nullptr) {
        int64_t n_tokens = 0;
        for (const Share& share : shares) n_tokens += share.n_tokens;
        tier_->computed(n_tokens, took);
        tier_->collect();
      }
      take(streams, shares, *out);
      return;
    }
    const bool no_room = out.status().code() == Code::kCapacity || out.status().code() == Code::kNoMemory;
    if (no_room && make_room()) continue;
    for (const Share& share : shares)
      if (Job& job = *streams[share.sequence]->job; !job.over) end(job, out.status());
    return;
  }
}

// The youngest sequence gives its blocks back and waits again, before all that came after it.
void Loop::preempt() {
  const auto youngest = std::max_element(running_.begin(), running_.end(), [](const Stream* a, const Stream* b) {
    return std::pair(a->job->id, a->choice) < std::pair(b->job->id, b->choice);
  });
  Stream* s = *youngest;
  running_.erase(youngest);
  static_cast<void>(cache_.release(s->sequence));
  s->computed = 0;
  if (tier_ != nullptr && s->choice == 0) s->job->lookup = tier_->look_up(s->job->match, s->job->request.prompt);
  ++s->job->usage.preemptions;
  ++figures_.preemptions;
  const auto place = std::find_if(waiting_.begin(), waiting_.end(),
                                  [&](const Stream* other) { return other->job->id > s->job->id; });
  waiting_.insert(place, s);
}

// A request that fails takes its other choices with it, those of this step included.
void Loop::take(const std::vector<Stream*>& streams, std::span<const Share> shares, const StepOutput& out) {
  const auto vocab = size_t(text_.vocab_size());
  const auto now = Clock::now();
  for (size_t i = 0; i < shares.size(); ++i) {
    Stream& s = *streams[shares[i].sequence];
    if (s.job->over) continue;
    Status status = out.statuses[i];
    if (status.ok()) {
      const auto row = size_t(out.first_row[i]) * vocab;
      status = go_on(s, shares[i].n_tokens, out.logits.subspan(row, vocab), now);
    }
    if (!status.ok()) end(*s.job, status);
  }
}

// The rows of a stream's tokens are stored: its answers grow once the last one is. Whatever goes wrong is this
// request's alone.
Status Loop::go_on(Stream& s, int64_t n_tokens, std::span<const float> logits, Clock::time_point now) {
  Job& job = *s.job;
  const int64_t n_prompt = std::ssize(job.request.prompt);
  figures_.prompt_tokens_computed += std::max<int64_t>(0, std::min(n_tokens, n_prompt - s.computed));
  s.computed += n_tokens;
  if (s.pending() > 0) return Status();
  try {
    // The other choices begin here: they share the blocks of the prompt.
    std::vector<Stream*> grown{&s};
    while (s.choice == 0 && std::ssize(job.streams) < job.request.n) {
      const auto forked = fork(s);
      if (!forked.ok()) return forked.status();
      grown.push_back(*forked);
    }
    for (Stream* stream : grown)
      if (Status status = grow(*stream, logits, now); !status.ok()) return status;
    return Status();
  } catch (const std::bad_alloc&) {
    return Status(Code::kNoMemory, "no memory for the answer");
  } catch (const std::exception& error) {
    return Status(Code::kInternal, std::string("the answer could not go on: ") + error.what());
  }
}

Result<Stream*> Loop::fork(Stream& first) {
  Job& job = *first.job;
  auto stream = std::make_unique<Stream>();
  AnswerOptions options = job.request.answer;
  options.sampling.seed += job.streams.size();
  auto answer = Answer::begin(text_, job.request.prompt, model_.context(), options);
  if (!answer.ok()) return answer.status();
  stream->answer = std::move(*answer);
  // Nothing may fail between the fork and the place that will release it.
  job.streams.reserve(job.streams.size() + 1);
  running_.reserve(running_.size() + 1);
  stream->tokens = first.tokens;
  const auto sequence = cache_.fork(first.sequence);
  if (!sequence.ok()) return sequence.status();
  stream->sequence = *sequence;
  stream->job = &job;
  stream->choice = std::ssize(job.streams);
  stream->computed = first.computed;
  running_.push_back(stream.get());
  job.streams.push_back(std::move(stream));
  return running_.back();
}

// Draws the stream's next token. Once a request's last choice has ended, nothing fails any more.
Status Loop::grow(Stream& s, std::span<const float> logits, Clock::time_point now) {
  Job& job = *s.job;
  const auto before = s.answer->tokens().size();
  auto drawn = s.answer->grow(logits);
  if (!drawn.ok()) return drawn.status();
  Answer::Grown& grown = *drawn;
  const bool counts = s.answer->tokens().size() > before;  // else it is the token that ends the answer
  job.usage.completion_tokens += counts;
  figures_.generated_tokens += counts;
  if (std::ssize(s.tokens) == std::ssize(job.request.prompt)) {  // its first
    if (s.choice == 0) {
      job.usage.first_token_seconds = seconds(now - job.arrived);
      figures_.first_token_seconds.add(job.usage.first_token_seconds);
    }
  } else {
    figures_.between_tokens_seconds.add(seconds(now - s.last_token));
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
  --job.open;
  --open_choices_;
  if (job.open == 0) finish(job, Status(), job.length ? figures_.finished_length : figures_.finished_stop);
  return Status();
}

bool Loop::settle() {
  if (tier_ == nullptr) return false;
  tier_->collect();
  return tier_->holds_blocks();
}

// --- ends
// ---------------------------------------------------------------------------------------------------------
void Loop::leave(Stream& s) {
  std::erase(waiting_, &s);
  if (std::erase(restoring_, &s) != 0) tier_->abandon(std::exchange(s.job->restore, nullptr));
  if (std::erase(running_, &s) == 0) return;
  for (int g = 0; g < std::ssize(cache_.options().groups); ++g) {
    if (const auto held = cache_.blocks_held(s.sequence, g); held.ok()) {
      s.blocks_held += *held;
      s.bytes_held += cache_.image_bytes(g) * held->n;
    }
  }
  static_cast<void>(cache_.release(s.sequence));
}

// The request ends before its choices do. An ok status: it was cancelled.
void Loop::end(Job& job, const Status& status) {
  for (const auto& stream : job.streams) leave(*stream);
  open_choices_ -= job.open;
  finish(job, status, status.ok() ? figures_.cancelled : figures_.failed);
}

void Loop::finish(Job& job, const Status& status, int64_t& counter) {
  ++counter;
  job.over = true;
  job.usage.total_seconds = seconds(Clock::now() - job.arrived);
  figures_.request_seconds.add(job.usage.total_seconds);
  ends_.push_back({std::move(jobs_.extract(job.id).mapped()), status});
}

void Loop::end_all(const Status& status) {
  step_began_.store(0);  // it may have thrown
  while (!jobs_.empty()) end(*jobs_.begin()->second, status);
}

std::vector<Loop::End> Loop::take_ends() { return std::exchange(ends_, {}); }

// --- figures
// ------------------------------------------------------------------------------------------------------
SchedulerStats Loop::figures() const {
  SchedulerStats figures = figures_;
  figures.running = std::ssize(running_);
  figures.waiting = std::ssize(waiting_);
  figures.restoring = std::ssize(restoring_);
  if (tier_ != nullptr) figures.tier = tier_->figures();
  return figures;
}

double Loop::seconds_in_step() const {
  const auto began = step_began_.load();
  return began == 0 ? 0 : seconds(Clock::now().time_since_epoch() - Clock::duration(began));
}

}  // namespace pagedkv::engine
