// pagedkv serve: the model, the server in front of it, and a table that says what was started.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <sstream>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/input.h"
#include "cli/output.h"
#include "cli/report.h"
#include "pagedkv/layout.h"
#include "server/server.h"

namespace pagedkv::cli {
namespace {

Result<std::vector<std::string>> api_keys(const ServeOptions& options) {
  std::vector<std::string> keys;
  if (options.api_key) keys.push_back(*options.api_key);
  if (options.api_key_file) {
    const auto content = read_text("serve", *options.api_key_file);
    if (!content.ok()) return content.status();
    std::istringstream lines(*content);
    for (std::string line; std::getline(lines, line);) {
      while (!line.empty() && (line.back() == '\r' || line.back() == ' ')) line.pop_back();
      if (!line.empty()) keys.push_back(line);
    }
    if (keys.empty())
      return invalid_argument(fmt::format("[serve] --api-key-file {} has no key in it", *options.api_key_file));
  }
  for (const std::string& key : keys)
    if (key.empty()) return invalid_argument("[serve] an API key is empty");
  return keys;
}

// What was started, and what it takes.
void print_start(const ServeOptions& options, const server::ServerOptions& server, engine::StepModel& model,
                 const engine::ProductsInfo& products, int port) {
  const CacheOptions& cache = model.cache().options();
  int64_t per_token = 0;
  for (const GroupSpec& group : cache.groups)
    per_token += bytes_per_token(group.shape).n * int64_t(group.layers.size());
  const int64_t seqs = server.scheduler.max_num_seqs, context = model.context().n;
  const Stats stats = model.cache().stats(false);
  const bool v6 = server.http.host.find(':') != std::string::npos;
  const std::string url = fmt::format("http://{}:{}", v6 ? "[" + server.http.host + "]" : server.http.host, port);
  std::vector<std::vector<std::string>> rows = {
      {"model", server.model_names.front(), options.engine.options.model_path},
      {"context", with_commas(context), "tokens of the longest sequence"},
      {"K and V", kv_quant_name(cache.groups.front().shape.formats),
       fmt::format("{} bytes a token, query path {}, kernels {}", with_commas(per_token),
                   query_path_name(model.cache().query_path()), model.cache().isa())},
      products_row(products),
      {"pool", human_bytes(cache.kv_memory.n),
       fmt::format("at most: {} tokens; {} blocks of {} from the start", with_commas(model.cache().capacity().n),
                   with_commas(stats.blocks_total), cache.block_size.n)},
      {"need", human_bytes(per_token * context * seqs),
       fmt::format("if {} sequences filled the context; when the pool is full, requests wait", seqs)},
      {"at once", with_commas(seqs),
       fmt::format("sequences in steps of {} tokens, {} more wait", server.scheduler.max_num_batched_tokens.n,
                   with_commas(server.scheduler.max_queue))},
      {"keys", server.api_keys.empty() ? "none" : std::to_string(server.api_keys.size()),
       server.api_keys.empty() ? "anybody who reaches the port may ask" : "Authorization: Bearer KEY"},
  };
  if (const auto& dir = options.engine.cache_dir)
    rows.push_back({"kept in", human_bytes(dir->budget.n),
                    fmt::format("at most, in {}: prompts of {} tokens and more are there after a restart",
                                dir->directory, with_commas(options.engine.options.tier.min_prefix.n))});
  rows.push_back({"URL", url, "page at /, API at /v1"});
  print_err("{}", table(rows, {Align::kLeft, Align::kRight, Align::kLeft}, "  "));
}

}  // namespace

int serve(const ServeOptions& options) {
  auto engine_options = cli::engine_options(options.engine);
  if (!engine_options.ok()) return fail(engine_options.status());
  auto keys = api_keys(options);
  if (!keys.ok()) return fail(keys.status());

  server::ServerOptions server = options.server;
  server.version = PAGEDKV_VERSION;
  server.api_keys = std::move(*keys);
  server.model_names = options.served_names;
  server.model_names.push_back(std::filesystem::path(engine_options->model_path).stem().string());
  if (server.scheduler.max_num_batched_tokens.n < server.scheduler.max_num_seqs) {
    return fail(
        invalid_argument(fmt::format("[serve] --max-num-batched-tokens is {}, less than --max-num-seqs {}",
                                     server.scheduler.max_num_batched_tokens.n, server.scheduler.max_num_seqs)));
  }
  engine_options->max_sequences = server.scheduler.max_num_seqs;
  engine_options->chunk = server.scheduler.max_num_batched_tokens;

  never_wait_for_err();
  server.log = [](const std::string& line) { print_err("{}\n", line); };
  server.lost_log_lines = lost_err_lines;
  int port = 0;
  engine::ProductsInfo products;
  server.on_listening = [&port](int bound) { port = bound; };
  ProgressBar progress("loading");
  server.on_ready = [&](engine::StepModel& model) { print_start(options, server, model, products, port); };
  const auto load = [&](const std::function<void(double)>& show) -> Result<std::unique_ptr<engine::StepModel>> {
    engine_options->progress = [&](double fraction) {
      progress.show(fraction);
      show(fraction);
    };
    auto engine = engine::Engine::load(*engine_options);
    progress.clear();
    if (!engine.ok()) return engine.status();
    products = (*engine)->products();
    return std::unique_ptr<engine::StepModel>(std::move(*engine));
  };
  const Status status = server::serve(server, load);
  return status.ok() ? 0 : fail(status);
}

}  // namespace pagedkv::cli
