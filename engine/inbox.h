// Where requests and cancels wait for the thread that runs the model. Figures go the other way: board.h.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/job.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

class Inbox {
 public:
  // As many choices may be open as run and wait at most.
  Inbox(int64_t max_running, int64_t max_waiting) : max_running_(max_running), max_waiting_(max_waiting) {}

  // --- any thread -----------------------------------------------------------------------------------------------
  // Errors: kCapacity (full), kUnavailable (stopped, or closed; the message says why).
  Result<RequestId> submit(std::unique_ptr<Job> job);
  void cancel(RequestId request);
  void stop();
  void wake();            // ends the wait() that goes on, or else the next one
  Status health() const;  // not ok: closed, and why
  struct Counts {
    int64_t open = 0;      // requests that came and whose end is not told
    int64_t arrivals = 0;  // of them, those that were not taken yet
    int64_t refused = 0;   // requests that found it full
  };
  Counts counts() const;

  // --- the thread that runs the model ---------------------------------------------------------------------------
  struct Mail {
    std::vector<std::unique_ptr<Job>> jobs;
    std::vector<RequestId> cancels;
    bool stop = false;
  };
  bool empty() const;  // no mail, and no stop
  // Until it is not empty, a wake(), or for so long.
  void wait(std::optional<std::chrono::milliseconds> at_most);
  Mail take();
  // What has become of the requests that were taken: choices that are still open, and requests that end now.
  void settle(int64_t open_choices, int64_t n_ended);
  // Nothing comes in any more.
  void close(const Status& why);

 private:
  bool is_empty() const { return arrivals_.empty() && cancels_.empty() && !stopping_; }

  const int64_t max_running_, max_waiting_;
  mutable std::mutex mutex_;  // of all below
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Job>> arrivals_;
  std::vector<RequestId> cancels_;
  uint64_t last_id_ = 0;
  int64_t choices_arrived_ = 0, choices_taken_ = 0;  // that are not finished
  int64_t open_ = 0, refused_ = 0;                   // see Counts
  bool stopping_ = false, woken_ = false;
  Status dead_;
};

}  // namespace pagedkv::engine
