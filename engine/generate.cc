// One prompt, one answer: the loop of the scheduler, on the caller's thread and with a single request in it.
#include <memory>
#include <string>
#include <utility>

#include "engine/clock.h"
#include "engine/engine.h"
#include "engine/engine_impl.h"
#include "engine/job.h"
#include "engine/loop.h"

namespace pagedkv::engine {
namespace {

double per_second(int64_t n, double seconds) { return n > 0 && seconds > 0 ? double(n) / seconds : 0; }

// Keeps what a step says until the caller hears of it, outside the step.
class Outbox : public RequestSink {
 public:
  void on_delta(Delta delta) override {
    text = std::move(delta.text);
    finish = delta.finish;
  }
  void on_end(const Status&, const Usage&) override {}

  std::string text;
  std::optional<FinishReason> finish;
};

}  // namespace

double GenerateResult::prefill_tok_s() const { return per_second(tokens_in - tokens_reused, prefill_seconds); }
// The first token comes out of the prefill.
double GenerateResult::decode_tok_s() const { return per_second(tokens_out - 1, decode_seconds); }

Result<GenerateResult> Engine::generate(const GenerateRequest& request,
                                        const std::function<bool(std::string_view)>& on_text) {
  Impl& e = *impl_;
  if (Status s = check_prompt(request.prompt, e.context, model().vocab_size); !s.ok())
    return Status(s.code(), "[generate] " + s.message());
  const auto outbox = std::make_shared<Outbox>();
  auto made = make_job(*e.text, e.context,
                       {.prompt = request.prompt,
                        .answer = {.max_tokens = request.max_tokens,
                                   .sampling = request.sampling,
                                   .stop = request.stop,
                                   .own_text = request.own_text}},
                       outbox);
  if (!made.ok()) return made.status();

  GenerateResult result;
  result.tokens_in = std::ssize(request.prompt);
  if (request.max_tokens.n == 0) {
    result.finish_reason = FinishReason::kLength;
    return result;
  }
  Loop loop(*this, {.max_num_seqs = 1, .max_num_batched_tokens = e.chunk, .max_step_seconds = 0});
  // Good until the request's end is dropped.
  const Job& job = **made;
  const Stream& stream = *job.streams[0];
  loop.accept(std::move(*made));
  const auto is_prefilled = [&] { return stream.computed >= result.tokens_in; };
  while (loop.has_work()) {
    loop.admit();
    loop.step();
    const std::string text = std::exchange(outbox->text, "");
    result.text += text;
    // Between the chunks of a prompt the caller is asked too, with nothing to show.
    const bool asked = !text.empty() || (loop.has_work() && !is_prefilled());
    if (asked && on_text && !on_text(text)) loop.cancel(job.id);
  }
  const std::vector<Loop::End> ends = loop.take_ends();
  if (!ends[0].status.ok()) return ends[0].status;

  const Usage& usage = job.usage;
  const double answered = seconds(Clock::now() - job.arrived);
  result.finish_reason = outbox->finish.value_or(FinishReason::kCancelled);
  result.tokens_reused = usage.cached_tokens;
  if (!is_prefilled()) {
    result.prefill_seconds = answered - usage.queue_seconds;
    return result;
  }
  result.prefill_seconds = usage.first_token_seconds - usage.queue_seconds;
  result.decode_seconds = answered - usage.first_token_seconds;
  result.text += stream.answer->rest();
  result.tokens = stream.answer->tokens();
  result.tokens_out = std::ssize(result.tokens);
  result.blocks_held = stream.blocks_held;
  result.bytes_held = stream.bytes_held;
  return result;
}

}  // namespace pagedkv::engine
