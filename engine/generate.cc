// One prompt, one answer: prefill in chunks, then token by token until something ends it.
#include <chrono>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "engine/engine_impl.h"

namespace pagedkv::engine {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double per_second(int64_t n, double seconds) { return n > 0 && seconds > 0 ? static_cast<double>(n) / seconds : 0; }

// Ends a sequence however its scope is left. Its full blocks stay cached for the next prompt.
class SequenceGuard {
 public:
  SequenceGuard(Cache& cache, SequenceId id) : cache_(cache), id_(id) {}
  ~SequenceGuard() { static_cast<void>(cache_.release(id_)); }
  SequenceGuard(const SequenceGuard&) = delete;
  SequenceGuard& operator=(const SequenceGuard&) = delete;

 private:
  Cache& cache_;
  SequenceId id_;
};

}  // namespace

double GenerateResult::prefill_tok_s() const { return per_second(tokens_in - tokens_reused, prefill_seconds); }
// The first token comes out of the prefill.
double GenerateResult::decode_tok_s() const { return per_second(tokens_out - 1, decode_seconds); }

Result<GenerateResult> Engine::generate(const GenerateRequest& request,
                                        const std::function<bool(std::string_view)>& on_text) {
  Impl& e = *impl_;
  const auto n_prompt = std::ssize(request.prompt);
  if (Status s = check_prompt(request.prompt, e.context, model().vocab_size); !s.ok())
    return Status(s.code(), "[generate] " + s.message());
  auto answer = Answer::begin(*e.text, request.prompt, e.context,
                              {.max_tokens = request.max_tokens,
                               .sampling = request.sampling,
                               .stop = request.stop,
                               .own_text = request.own_text});
  if (!answer.ok()) return answer.status();

  GenerateResult result;
  result.tokens_in = n_prompt;
  if (request.max_tokens.n == 0) {
    result.finish_reason = FinishReason::kLength;
    return result;
  }
  auto started = e.cache->start(request.prompt);
  if (!started.ok()) return started.status();
  const SequenceGuard guard(*e.cache, started->id);
  result.tokens_reused = started->reused.n;

  // Gives text to the caller; false once the caller has had enough.
  auto show = [&](const std::string& text) {
    result.text += text;
    return !on_text || on_text(text);
  };
  // One step of this sequence alone.
  auto forward = [&](std::span<const int32_t> tokens) -> Result<std::span<const float>> {
    const StepInput input{.sequence = started->id, .tokens = tokens};
    auto out = step({&input, 1});
    if (!out.ok()) return out.status();
    if (!out->statuses[0].ok()) return out->statuses[0];
    return out->logits;
  };

  auto clock = std::chrono::steady_clock::now();
  std::span<const float> logits;
  for (int64_t at = started->reused.n; at < n_prompt;) {
    const int64_t n = std::min(e.chunk.n, n_prompt - at);
    auto out = forward(std::span(request.prompt).subspan(static_cast<size_t>(at), static_cast<size_t>(n)));
    if (!out.ok()) return out.status();
    logits = *out;
    at += n;
    if (at < n_prompt && !show("")) {
      result.finish_reason = FinishReason::kCancelled;
      result.prefill_seconds = seconds_since(clock);
      return result;
    }
  }
  result.prefill_seconds = seconds_since(clock);

  clock = std::chrono::steady_clock::now();
  for (;;) {
    const auto grown = (*answer)->grow(logits);
    if (!grown.ok()) return grown.status();
    const bool wanted = grown->text.empty() || show(grown->text);
    if (grown->finish || !wanted) {
      result.finish_reason = grown->finish.value_or(FinishReason::kCancelled);
      break;
    }
    auto out = forward({&grown->token, 1});
    if (!out.ok()) return out.status();
    logits = *out;
  }
  result.decode_seconds = seconds_since(clock);
  result.text += (*answer)->rest();
  result.tokens = (*answer)->tokens();
  result.tokens_out = std::ssize(result.tokens);
  for (int g = 0; g < std::ssize(e.cache->options().groups); ++g) {
    if (auto held = e.cache->blocks_held(started->id, g); held.ok()) {
      result.blocks_held += *held;
      result.bytes_held += e.cache->image_bytes(g) * held->n;
    }
  }
  return result;
}

}  // namespace pagedkv::engine
