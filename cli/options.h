// The one file that maps words of the command line to options, for every subcommand.
//
// A word that cannot be right (not a number, out of range, two options that exclude each other) is a usage error,
// thrown as CLI::ParseError by the parser and nowhere else. What only the environment or the model can tell is a
// Status of engine_options().
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "engine/engine.h"
#include "engine/text.h"
#include "pagedkv/disk_tier.h"
#include "pagedkv/format.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"
#include "server/server.h"

namespace pagedkv::cli {

// The engine's options, and which of them the command line gave: the others may come from the environment.
struct EngineWords {
  engine::EngineOptions options;
  std::optional<DiskTierOptions> cache_dir;  // where blocks are kept for the next start; opened by engine_options()
  std::optional<KvQuantConfig> kv_quant;
  std::optional<Format> cache_type_k, cache_type_v;
  std::optional<bool> dynamic;
};

struct RunOptions {
  EngineWords engine;
  engine::SamplingOptions sampling;
  // One of these three is given.
  std::optional<std::string> prompt;
  std::optional<std::string> prompt_file;  // "-": stdin
  bool interactive = false;
  std::optional<std::string> session;  // a conversation of this name, in the folder of --cache-dir
  std::optional<std::string> system;
  std::optional<Tokens> max_tokens;  // none: until the context is full
  std::vector<std::string> stop;
  bool raw = false;
  bool stats = false;
  bool json = false;
};

struct ServeOptions {
  EngineWords engine;
  server::ServerOptions server;  // names, keys and callbacks are filled in by serve()
  std::vector<std::string> served_names;
  std::optional<std::string> api_key;
  std::optional<std::string> api_key_file;
};

struct PerplexityOptions {
  EngineWords engine;
  std::string text_path;
  Tokens chunk{2048};
  int64_t chunks = 0;  // 0: all that the text has
  std::optional<KvQuantConfig> reference;
  bool json = false;
};

struct InspectOptions {
  std::string model_path;
  Tokens context{0};  // 0: the trained context
  Tokens block_size{16};
  Bytes kv_memory{0};  // 0: what the engine would take
  bool json = false;
};

struct InfoOptions {
  bool json = false;
};

struct BenchCommand {
  enum class Kind { kLimits, kCache, kKernels, kProducts, kModel } kind = Kind::kCache;
  bench::BenchOptions options;
};

// Add a command's options to `command`. The struct is filled while the command line is parsed and must outlive it.
void add_run_options(CLI::App& command, RunOptions& options);
void add_serve_options(CLI::App& command, ServeOptions& options);
void add_perplexity_options(CLI::App& command, PerplexityOptions& options);
void add_inspect_options(CLI::App& command, InspectOptions& options);
void add_info_options(CLI::App& command, InfoOptions& options);
void add_bench_options(CLI::App& command, BenchCommand& options);

// What the command line left open is filled from PAGEDKV_QUANT and PAGEDKV_DYNAMIC, then from the article's names.
// Errors: kInvalidArgument with the variable, its value and what is allowed, also where a flag overrides it: a
// variable that says nothing sensible is a mistake whoever wins.
Result<engine::EngineOptions> engine_options(const EngineWords& words);

}  // namespace pagedkv::cli
