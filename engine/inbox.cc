#include "engine/inbox.h"

#include <string>
#include <utility>

namespace pagedkv::engine {

Result<RequestId> Inbox::submit(std::unique_ptr<Job> job) {
  const std::lock_guard lock(mutex_);
  if (!dead_.ok()) return Status(Code::kUnavailable, "the engine has ended: " + dead_.message());
  if (stopping_) return Status(Code::kUnavailable, "the engine is being stopped");
  const int64_t open_choices = choices_arrived_ + choices_taken_, most = max_running_ + max_waiting_;
  if (open_choices + job->request.n > most) {
    ++refused_;
    return Status(Code::kCapacity, std::to_string(open_choices) + " sequences run or wait, the limit is " +
                                       std::to_string(most) + " (max_num_seqs + max_queue)");
  }
  choices_arrived_ += job->request.n;
  ++open_;
  const RequestId id = job->id = RequestId(++last_id_);
  arrivals_.push_back(std::move(job));
  changed_.notify_one();
  return id;
}

void Inbox::cancel(RequestId request) {
  const std::lock_guard lock(mutex_);
  cancels_.push_back(request);
  changed_.notify_one();
}

void Inbox::stop() {
  const std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_one();
}

void Inbox::wake() {
  const std::lock_guard lock(mutex_);
  woken_ = true;
  changed_.notify_one();
}

Status Inbox::health() const {
  const std::lock_guard lock(mutex_);
  return dead_;
}

Inbox::Counts Inbox::counts() const {
  const std::lock_guard lock(mutex_);
  return {.open = open_, .arrivals = std::ssize(arrivals_), .refused = refused_};
}

bool Inbox::empty() const {
  const std::lock_guard lock(mutex_);
  return is_empty();
}

void Inbox::wait(std::optional<std::chrono::milliseconds> at_most) {
  std::unique_lock lock(mutex_);
  const auto over = [this] { return woken_ || !is_empty(); };
  if (at_most) {
    changed_.wait_for(lock, *at_most, over);
  } else {
    changed_.wait(lock, over);
  }
  woken_ = false;
}

Inbox::Mail Inbox::take() {
  const std::lock_guard lock(mutex_);
  choices_taken_ += std::exchange(choices_arrived_, 0);
  return {.jobs = std::exchange(arrivals_, {}), .cancels = std::exchange(cancels_, {}), .stop = stopping_};
}

void Inbox::settle(int64_t open_choices, int64_t n_ended) {
  const std::lock_guard lock(mutex_);
  choices_taken_ = open_choices;
  open_ -= n_ended;
}

void Inbox::close(const Status& why) {
  const std::lock_guard lock(mutex_);
  dead_ = why;
}

}  // namespace pagedkv::engine
