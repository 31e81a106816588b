// A request on its way through the scheduler, and the sequences of its choices.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/answer.h"
#include "engine/clock.h"
#include "engine/request.h"
#include "engine/text.h"
#include "engine/tier_traffic.h"
#include "pagedkv/cache.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv::engine {

struct Job;

// One choice of a request: a sequence and the answer that grows on it.
struct Stream {
  Job* job = nullptr;
  int64_t choice = 0;
  std::unique_ptr<Answer> answer;
  std::vector<int32_t> tokens;  // prompt, then what was drawn and is not the end
  int64_t computed = 0;         // leading tokens whose K and V are stored; meaningful while it runs
  SequenceId sequence;
  Blocks blocks_held;  // when it ended, all groups together
  Bytes bytes_held;    // of those blocks, padding included
  Clock::time_point last_token;

  int64_t pending() const { return std::ssize(tokens) - computed; }
};

// Made by whoever asks, then touched by the thread that runs it alone.
struct Job {
  RequestId id{};  // ascending with arrival
  ServeRequest request;
  std::shared_ptr<RequestSink> sink;
  PrefixMatch match;                             // of the prompt, as last looked up
  std::shared_ptr<TierLookup> lookup;            // of the prompt in the tier; null: nothing to wait for
  std::shared_ptr<TierRestore> restore;          // while its beginning is being read back
  std::vector<std::unique_ptr<Stream>> streams;  // choice 0 alone until the prompt is computed
  int64_t open = 0;                              // choices that are not finished, those to come included
  int64_t times_passed = 0;                      // while it waited, by others that came later
  bool admitted = false;
  bool length = false;  // a choice ended at its limit
  bool over = false;    // nothing of it runs or waits any more
  Usage usage;
  Clock::time_point arrived;

  // Choices that will come out of this stream: all of them while the prompt is not computed.
  int64_t slots(const Stream& s) const { return s.choice == 0 ? 1 + request.n - std::ssize(streams) : 1; }
};

// Errors: those of Answer::begin.   Requires: check_prompt, request.n >= 1.   Any thread.
Result<std::unique_ptr<Job>> make_job(const Text& text, Tokens context, ServeRequest request,
                                      std::shared_ptr<RequestSink> sink);

}  // namespace pagedkv::engine
