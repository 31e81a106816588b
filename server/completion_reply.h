// What a completion looks like on the wire: whole, or as server-sent events.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/scheduler.h"
#include "engine/text.h"
#include "server/completion_request.h"

namespace pagedkv::server {

// Builds the bodies of one request. One thread.
class CompletionReply {
 public:
  // `text` must outlive it. n_choices: of all prompts together.
  CompletionReply(Endpoint endpoint, std::string id, std::string model, int64_t created, int64_t n_choices,
                  bool logprobs, bool usage_in_stream, const engine::Text& text);

  // Takes in what a step added. Streaming: returns the events to send, maybe none.
  void add(const engine::Delta& delta);
  std::string events(const engine::Delta& delta);
  std::string last_events(const engine::Usage& usage) const;  // usage if asked for, then [DONE]
  std::string whole(const engine::Usage& usage) const;
  static std::string error_event(const ApiError& error);  // the last one

 private:
  struct Choice {
    std::string text;
    std::vector<engine::ScoredToken> tokens;
    std::string finish;
    bool begun = false;
    std::vector<engine::ScoredToken> held =
        {};                   // tokens whose text was not shown yet: a stop string may cut it off
    int64_t n_shown = 0;      // bytes of text,
    int64_t n_listed = 0;     // and those that the listed tokens stand for
    int64_t text_offset = 0;  // characters before the next token, for the older form of logprobs
  };
  std::vector<engine::ScoredToken> listed(Choice& choice, const engine::Delta& delta) const;
  std::string event(std::string choices, bool usage_null) const;

  const Endpoint endpoint_;
  const std::string id_, model_;
  const int64_t created_;
  const bool logprobs_, usage_in_stream_;
  const engine::Text& text_;
  std::vector<Choice> choices_;
};

}  // namespace pagedkv::server
