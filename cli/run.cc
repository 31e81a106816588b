// One prompt, one answer: as it comes, or as one JSON object.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "cli/chat.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/input.h"
#include "cli/interrupt.h"
#include "cli/output.h"
#include "cli/report.h"

namespace pagedkv::cli {
namespace {

using Json = nlohmann::ordered_json;
using engine::FinishReason;

// --- the prompt --------------------------------------------------------------------------------------------------
Result<std::string> read_prompt(const RunOptions& options) {
  if (options.system)
    if (Status status = check_utf8("prompt", "--system", *options.system); !status.ok()) return status;
  if (!options.prompt) return read_text("prompt", *options.prompt_file);
  if (options.prompt->empty()) return invalid_argument("[prompt] --prompt is empty");
  if (Status status = check_utf8("prompt", "--prompt", *options.prompt); !status.ok()) return status;
  return *options.prompt;
}

Result<std::vector<int32_t>> prompt_tokens(const RunOptions& options, const engine::Text& text,
                                           const std::string& prompt) {
  if (options.raw) return text.tokenize(prompt, true, true);
  if (!text.has_chat_template()) {
    if (options.system) return invalid_argument("[prompt] --system: the model has no chat template to put it in");
    return text.tokenize(prompt, true, false);
  }
  // The template's own system message (text.default_system()) is not added. On SmolLM2-135M, Q4_1, it makes the
  // likeliest answer to "What is the capital of France?" "L'Etoile, la Marseillaise, ..." in libllama too.
  std::vector<engine::ChatMessage> messages;
  if (options.system) messages.push_back({"system", *options.system});
  messages.push_back({"user", prompt});
  auto tokens = text.tokenize_chat(messages);
  if (!tokens.ok() && tokens.status().code() == Code::kUnsupported)
    return Status(Code::kUnsupported, tokens.status().message() + "; --raw gives it the prompt as it is");
  return tokens;
}

// --- what is told afterwards -------------------------------------------------------------------------------------
void print_result_json(const engine::GenerateResult& result, const engine::ProductsInfo& products,
                       const Stats& stats) {
  const Json out{{"text", result.text},
                 {"finish_reason", engine::finish_reason_name(result.finish_reason)},
                 {"tokens_in", result.tokens_in},
                 {"tokens_reused", result.tokens_reused},
                 {"tokens_out", result.tokens_out},
                 {"prefill_tok_s", result.prefill_tok_s()},
                 {"decode_tok_s", result.decode_tok_s()},
                 {"products", Json{{"isa", products.n_own > 0 ? Json(products.isa) : Json(nullptr)},
                                   {"own", products.n_own},
                                   {"ggml", products.n_ggml}}},
                 {"stats", stats_json(stats)}};
  print_out("{}\n", out.dump(1, ' ', false, Json::error_handler_t::replace));
}

void print_finish(const engine::GenerateResult& result, const RunOptions& options, const engine::Engine& engine) {
  if (result.finish_reason == FinishReason::kCancelled) {
    print_err("pagedkv: [cancelled] the answer is not whole\n");
  } else if (result.finish_reason == FinishReason::kLength) {
    const bool by_option = options.max_tokens && result.tokens_out >= options.max_tokens->n;
    print_err("pagedkv: [length] {}\n",
              by_option ? fmt::format("the answer was ended after {} tokens (--max-tokens)", result.tokens_out)
                        : fmt::format("the context of {} tokens is full: {} of the prompt, {} of the answer",
                                      engine.context().n, result.tokens_in, result.tokens_out));
  }
}

void print_figures(const engine::GenerateResult& result, engine::Engine& engine, const Stats& stats) {
  const CacheOptions& cache = engine.cache_options();
  int64_t per_token = 0;
  for (const GroupSpec& group : cache.groups)
    per_token += bytes_per_token(group.shape).n * int64_t(group.layers.size());
  const std::vector<std::vector<std::string>> rows = {
      {"prefill", fmt::format("{:.1f} tok/s", result.prefill_tok_s()),
       fmt::format("{} tokens, {} of them reused, {:.2f} s", result.tokens_in, result.tokens_reused,
                   result.prefill_seconds)},
      {"decode", fmt::format("{:.1f} tok/s", result.decode_tok_s()),
       fmt::format("{} tokens, {:.2f} s, {} threads", result.tokens_out, result.decode_seconds, engine.threads())},
      {"blocks used", with_commas(result.blocks_held.n),
       fmt::format("of {} tokens; the pool has {}", cache.block_size.n, with_commas(stats.blocks_total))},
      products_row(engine.products()),
      {"bytes per token", with_commas(per_token),
       fmt::format("{}, query path {}", kv_quant_name(cache.groups.front().shape.formats),
                   query_path_name(engine.cache().query_path()))},
      {"KV bytes held", human_bytes(result.bytes_held.n),
       fmt::format("{} writable, {} in RAM", human_bytes(stats.bytes_committed),
                   human_bytes(stats.bytes_resident))},
  };
  print_err("\n{}", table(rows, {Align::kLeft, Align::kRight, Align::kLeft}, "  "));
}

}  // namespace

int run(const RunOptions& options) {
  auto engine_options = cli::engine_options(options.engine);
  if (!engine_options.ok()) return fail(engine_options.status());
  const bool talks = options.interactive || options.session;
  const Result<std::string> prompt = talks ? std::string() : read_prompt(options);
  if (!prompt.ok()) return fail(prompt.status());

  ProgressBar progress("loading");
  engine_options->progress = [&progress](double fraction) { progress.show(fraction); };
  auto engine = engine::Engine::load(*engine_options);
  progress.clear();
  if (!engine.ok()) return fail(engine.status());
  if (talks) return chat(options, **engine);

  engine::GenerateRequest request{.prompt = {},
                                  .sampling = options.sampling,
                                  .stop = options.stop,
                                  .own_text = !options.raw && (*engine)->text().has_chat_template()};
  if (options.max_tokens) request.max_tokens = *options.max_tokens;
  auto tokens = prompt_tokens(options, (*engine)->text(), *prompt);
  if (!tokens.ok()) return fail(tokens.status());
  request.prompt = std::move(*tokens);

  bool shown = false, written = true;
  const Interrupt ctrl_c(Interrupt::Second::kKills);
  const auto show = [&](std::string_view text) {
    if (!options.json && !text.empty()) {
      shown = true;
      written = out(text);
    }
    return written && interrupted == 0;
  };
  const auto result = (*engine)->generate(request, show);
  const Stats stats = (*engine)->cache().stats();
  if (!result.ok()) {
    if (shown) err("\n");  // away from the part of the answer that is out already
    return fail(result.status());
  }
  if (options.json) {
    print_result_json(*result, (*engine)->products(), stats);
  } else if (!result->text.ends_with('\n')) {
    out("\n");
  }
  if (const int code = finish("run"); code != 0) return code;

  print_finish(*result, options, **engine);
  if (!options.json) print_figures(*result, **engine, stats);
  if (options.stats) print_stats(stats);
  return result->finish_reason == FinishReason::kCancelled ? kExitCancelled : 0;
}

}  // namespace pagedkv::cli
