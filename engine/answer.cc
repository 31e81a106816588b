#include "engine/answer.h"

#include <algorithm>
#include <string>
#include <utility>

namespace pagedkv::engine {

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

Status check_prompt(std::span<const int32_t> prompt, Tokens context, int64_t vocab_size) {
  if (prompt.empty()) return invalid_argument("the prompt is empty");
  if (std::ssize(prompt) >= context.n) {
    return invalid_argument("the prompt has " + std::to_string(prompt.size()) + " tokens, the context is " +
                            std::to_string(context.n) + " and must hold an answer too");
  }
  for (const int32_t token : prompt) {
    if (token < 0 || token >= vocab_size) {
      return invalid_argument("token " + std::to_string(token) + " in the prompt, the vocabulary has " +
                              std::to_string(vocab_size));
    }
  }
  return Status();
}

// The last token of an answer needs no slot: it is never fed to the model. Hence one more than the context leaves.
Answer::Answer(const Text& text, std::span<const int32_t> prompt, Tokens context, const AnswerOptions& options)
    : text_(text),
      room_(options.max_tokens.n < 0 ? context.n - std::ssize(prompt) + 1
                                     : std::min(options.max_tokens.n, context.n - std::ssize(prompt) + 1)),
      ignore_end_(options.ignore_end),
      begins_text_(text.has_space_prefix() &&
                   (options.own_text || prompt.empty() || text.is_control(prompt.back()))),
      stream_(options.stop) {}

Result<std::unique_ptr<Answer>> Answer::begin(const Text& text, std::span<const int32_t> prompt, Tokens context,
                                              const AnswerOptions& options) {
  std::unique_ptr<Answer> answer(new Answer(text, prompt, context, options));
  auto sampler = text.make_sampler(options.sampling);
  if (!sampler.ok()) return sampler.status();
  answer->sampler_ = std::move(*sampler);
  for (const int32_t token : prompt) answer->sampler_->accept(token);
  return answer;
}

Result<Answer::Grown> Answer::grow(std::span<const float> logits) {
  const auto token = sampler_->sample(logits);
  if (!token.ok()) return token.status();
  Grown grown{.token = *token};
  if (!ignore_end_ && text_.is_end(grown.token)) {
    grown.text = stream_.finish();
    grown.finish = FinishReason::kStop;
    return grown;
  }
  tokens_.push_back(grown.token);
  std::string piece = text_.piece(grown.token);
  if (begins_text_ && !piece.empty()) {
    if (piece.front() == ' ') piece.erase(0, 1);
    begins_text_ = false;
  }
  grown.text = stream_.push(piece);
  if (stream_.stopped()) {
    grown.finish = FinishReason::kStop;
  } else if (std::ssize(tokens_) >= room_) {
    grown.text += stream_.finish();
    grown.finish = FinishReason::kLength;
  }
  return grown;
}

}  // namespace pagedkv::engine
