// The bodies of /v1/chat/completions and /v1/completions, checked field by field.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/scheduler.h"
#include "engine/text.h"
#include "server/api_error.h"
#include "server/json_body.h"

namespace pagedkv::server {

enum class Endpoint : uint8_t { kChat, kCompletions };

// What a request may ask for, and what it gets when it says nothing.
struct RequestLimits {
  std::vector<std::string> models;   // names that `model` may have; the first is the server's own
  engine::SamplingOptions sampling;  // defaults
  Tokens max_tokens{-1};             // default; < 0: until the context is full
  Tokens context{0};
  int64_t max_choices = 128;
};

struct CompletionRequest {
  Endpoint endpoint = Endpoint::kChat;
  std::string model;                          // as asked
  std::vector<engine::ServeRequest> prompts;  // one, or several for /v1/completions with a list
  bool stream = false;
  bool include_usage = false;
  bool logprobs = false;
  std::vector<std::string> ignored;  // fields that are not known here; they changed nothing
  std::string user;                  // for the log
};

// The ids that `list` has. param: its name in errors.
ApiResult<std::vector<int32_t>> token_ids(const Json& list, int64_t vocab_size, const std::string& param);

// Parses, checks and tokenizes, in a time that grows with the body and no faster. What is too long for the context
// whatever its tokens are is not tokenized. Errors name the field, its value and what is allowed; also
// client_left().
ApiResult<CompletionRequest> read_completion(Endpoint endpoint, std::string_view body, const engine::Text& text,
                                             const RequestLimits& limits, const Gone& gone = {});

}  // namespace pagedkv::server
