// One answer as it grows: draws tokens, turns them into text that may be shown, and knows when it is over.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/text.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv::engine {

enum class FinishReason : uint8_t { kStop, kLength, kCancelled };
const char* finish_reason_name(FinishReason reason);  // "stop", "length", "cancelled"

struct AnswerOptions {
  Tokens max_tokens{-1};  // < 0: until the context is full
  SamplingOptions sampling;
  std::vector<std::string> stop;
  bool ignore_end = false;  // go on after the token that ends an answer
  // The answer is a text of its own, as a chat's message is, and does not go on where the prompt ends: the space
  // that some vocabularies put in front of a text is left out.
  bool own_text = false;
};

// kInvalidArgument: the prompt is empty, fills the context, or has a token that the vocabulary has not.
Status check_prompt(std::span<const int32_t> prompt, Tokens context, int64_t vocab_size);

// One thread.
class Answer {
 public:
  // `text` must outlive it. Errors: those of check_sampling, and of a grammar that cannot be read.
  static Result<std::unique_ptr<Answer>> begin(const Text& text, std::span<const int32_t> prompt, Tokens context,
                                               const AnswerOptions& options);

  struct Grown {
    int32_t token = -1;  // drawn; part of tokens() unless it ended the answer
    std::string text;    // what can be shown now
    std::optional<FinishReason> finish;
  };
  // Draws the next token. Requires: no finish was returned before. Errors: those of Sampler::sample; the answer is
  // over.
  Result<Grown> grow(std::span<const float> logits);
  // What was held back, for an answer that ends before it is finished.
  std::string rest() { return stream_.finish(); }
  const std::vector<int32_t>& tokens() const { return tokens_; }

 private:
  Answer(const Text& text, std::span<const int32_t> prompt, Tokens context, const AnswerOptions& options);

  const Text& text_;
  const int64_t room_;  // tokens the answer may have: what was asked, or what the context leaves
  const bool ignore_end_;
  bool begins_text_;  // a space that the next piece begins with is the vocabulary's, not the answer's
  std::unique_ptr<Sampler> sampler_;
  TextStream stream_;
  std::vector<int32_t> tokens_;
};

}  // namespace pagedkv::engine
