// How well a model predicts a text with K and V stored in a format, and how far that is from another format.
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/input.h"
#include "cli/output.h"

namespace pagedkv::cli {
namespace {

using Json = nlohmann::ordered_json;
using engine::FidelityResult;

// "3 min 20 s left", once enough is done to tell.
class TimeLeft {
 public:
  std::string at(double fraction) const {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start_;
    if (passed.count() < 1 || fraction <= 0) return "";
    const auto seconds = std::llround(passed.count() / fraction * (1 - fraction));
    return seconds < 60 ? fmt::format("{} s left", seconds)
                        : fmt::format("{} min {} s left", seconds / 60, seconds % 60);
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void print_json(const FidelityResult& result, const PerplexityOptions& options, const std::string& format) {
  Json out{{"ppl", result.ppl},          {"kld_mean", nullptr},
           {"kld_p999", nullptr},        {"top1", nullptr},
           {"chunks", result.chunks},    {"tokens", result.tokens_scored},
           {"context", options.chunk.n}, {"format", format},
           {"reference", nullptr},       {"ppl_reference", nullptr}};
  if (result.reference) {
    out["kld_mean"] = result.reference->kld_mean;
    out["kld_p999"] = result.reference->kld_p999;
    out["top1"] = result.reference->top1;
    out["reference"] = kv_quant_name(*options.reference);
    out["ppl_reference"] = result.reference->ppl;
  }
  print_out("{}\n", out.dump(1));
}

void print_table(const FidelityResult& result, const PerplexityOptions& options, const std::string& format) {
  std::vector<std::vector<std::string>> rows = {
      {"perplexity", fmt::format("{:.4f}", result.ppl),
       fmt::format("{}, {} chunks of {} tokens, {} tokens scored", format, with_commas(result.chunks),
                   with_commas(options.chunk.n), with_commas(result.tokens_scored))}};
  if (const auto& against = result.reference) {
    const std::string reference = kv_quant_name(*options.reference);
    rows.push_back({"reference", fmt::format("{:.4f}", against->ppl),
                    fmt::format("{}; {:+.3f} %", reference, 100 * (result.ppl / against->ppl - 1))});
    rows.push_back({"mean KLD", fmt::format("{:.6f}", against->kld_mean), "nats, from " + reference});
    rows.push_back({"99.9 % KLD", fmt::format("{:.5f}", against->kld_p999), ""});
    rows.push_back({"same top-1", fmt::format("{:.2f} %", against->top1), ""});
  }
  print_out("{}", table(rows, {Align::kLeft, Align::kRight, Align::kLeft}));
}

}  // namespace

int perplexity(const PerplexityOptions& options) {
  auto engine_options = cli::engine_options(options.engine);
  if (!engine_options.ok()) return fail(engine_options.status());
  engine_options->context = options.chunk;
  const auto text = read_text("perplexity", options.text_path);
  if (!text.ok()) return fail(text.status());

  ProgressBar loading("loading");
  engine_options->progress = [&loading](double fraction) { loading.show(fraction); };
  auto engine = engine::Engine::load(*engine_options);
  loading.clear();
  if (!engine.ok()) return fail(engine.status());
  const auto tokens = (*engine)->text().tokenize(*text, true, false);
  if (!tokens.ok()) return fail(tokens.status());

  ProgressBar scoring("scoring");
  const TimeLeft time_left;
  const auto result =
      (*engine)->fidelity({.tokens = *tokens,
                           .chunk = options.chunk,
                           .max_chunks = options.chunks,
                           .reference = options.reference,
                           .progress = [&](double fraction) { scoring.show(fraction, time_left.at(fraction)); }});
  scoring.clear();
  if (!result.ok()) return fail(result.status());
  const std::string format = kv_quant_name(engine_options->kv_formats);
  if (options.json) {
    print_json(*result, options, format);
  } else {
    print_table(*result, options, format);
  }
  return finish("perplexity");
}

}  // namespace pagedkv::cli
