#include "cli/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "cli/session.h"
#include "cli/words.h"
#include "pagedkv/log.h"
#include "pagedkv/paged_kv_cache.h"

namespace pagedkv::cli {
namespace {

constexpr int64_t kMaxBlockSize = 256;
constexpr int64_t kMaxPosition = 0x7fffffff;  // positions are int32 in a plan
constexpr int64_t kMaxThreads = 512;          // ggml's limit
constexpr int kHelpColumn = 38;

void notice_foreign_spelling(const std::string& mode) {
  if (is_foreign_spelling(mode))
    notice(fmt::format("{}: here the format with one scale a row, not ggml's of that name (groups of 32)", mode));
}

CLI::Option* add_model(CLI::App& command, std::string& path) {
  return add(command, "-m,--model", "FILE", "the model, a GGUF file", [&path](const std::string& word) {
    path = word;
    return Status();
  });
}

CLI::Option* add_block_size(CLI::App& command, Tokens& block_size) {
  return add(
      command, "--block-size", "N",
      "tokens in a block, 1 to 256, default 16. Larger: less bookkeeping, more room lost in a sequence's last "
      "block, and prefixes are shared in coarser steps",
      whole(1, kMaxBlockSize, [&block_size](int64_t n) { block_size = Tokens(n); }));
}

CLI::Option* add_kv_memory(CLI::App& command, Bytes& kv_memory) {
  return add(
      command, "--kv-memory", "SIZE",
      "most bytes of K and V, as plain bytes or with KiB, MiB or GiB. Default: half of min(RAM, cgroup limit) "
      "without the weights, read once at the start. Larger: longer sequences fit",
      [&kv_memory](const std::string& word) {
        const auto bytes = read_bytes(word);
        if (bytes.ok()) kv_memory = *bytes;
        return bytes.status();
      });
}

CLI::Option* add_threads(CLI::App& command, int& threads) {
  return add(
      command, "-t,--threads", "N",
      "threads, 1 to 512. Default: the CPUs this process may use (affinity, cgroup quota). More than there are "
      "cores makes it slower",
      whole(1, kMaxThreads, [&threads](int64_t n) { threads = int(n); }));
}

CLI::Option* add_json(CLI::App& command, bool& json, const std::string& help) {
  return command.add_flag("--json", json, wrapped(help));
}

Take format_word(std::optional<Format>& target) {
  return [&target](const std::string& word) {
    const auto format = parse_format(word);
    if (!format.ok()) return format.status();
    notice_foreign_spelling(word);
    target = *format;
    return Status();
  };
}

void add_reproducible(CLI::App& command, bool& reproducible) {
  command.add_flag(
      "--reproducible", reproducible,
      wrapped(
          "equal prompts give equal logits to the bit, however they are chunked, batched or found in the cache. "
          "Where our kernels multiply with every weight they do so anyway; ggml's products of single tokens get "
          "slower"));
}

void add_query_path(CLI::App& command, QueryPath& path) {
  add(command, "--query-path", "PATH",
      "how quantized K and V are multiplied: f32 (exact), int8 (queries and weights rounded to 8 bits, 15 for q8: "
      "faster) or auto, the faster one for the format and shape. Default: auto",
      [&path](const std::string& word) {
        const auto parsed = parse_query_path(word);
        if (parsed.ok()) path = *parsed;
        return parsed.status();
      });
}

void add_products(CLI::App& command, engine::ProductsChoice& products) {
  add(command, "--products", "WHO",
      "who multiplies with quantized weights: auto (our kernels for the types that `pagedkv info` lists, ggml for "
      "the others) or ggml (always). Default: auto",
      [&products](const std::string& word) {
        const auto parsed = engine::parse_products_choice(word);
        if (parsed.ok()) products = *parsed;
        return parsed.status();
      });
}

// The model, and where and how K and V are kept.
void add_engine_options(CLI::App& command, EngineWords& words) {
  engine::EngineOptions& options = words.options;
  add_model(command, options.model_path)->required();
  add_threads(command, options.threads);
  auto* quant = add(command, "--kv-quant,--paged-kv-quant,--paged-kv-quantization,--kv-cache-dtype", "MODE",
                    "how K and V are stored: off (f16), f32, bf16, q8, q6, q4, or K:V such as q8:q4. Default: "
                    "PAGEDKV_QUANT, else off. Fewer bits: less memory, less exact",
                    [&words](const std::string& word) {
                      const auto config = parse_kv_quant(word);
                      if (!config.ok()) return config.status();
                      notice_foreign_spelling(word);
                      words.kv_quant = *config;
                      return Status();
                    });
  add(command, "--cache-type-k", "MODE", "the format of K alone; not together with --kv-quant",
      format_word(words.cache_type_k))
      ->excludes(quant);
  add(command, "--cache-type-v", "MODE", "the format of V alone; not together with --kv-quant",
      format_word(words.cache_type_v))
      ->excludes(quant);
  add_block_size(command, options.block_size);
  add(command, "--num-blocks", "N",
      "blocks that exist from the start, default 1024. Larger: memory is taken earlier, not more of it, unless "
      "--no-dynamic makes this the limit",
      whole(1, kMaxBlocks, [&options](int64_t n) { options.num_blocks = Blocks(n); }));
  add_kv_memory(command, options.kv_memory);
  auto* on = command.add_flag_callback(
      "--dynamic", [&words] { words.dynamic = true; },
      wrapped("grow past --num-blocks on demand, up to --kv-memory. Default: PAGEDKV_DYNAMIC, else on"));
  command
      .add_flag_callback(
          "--no-dynamic", [&words] { words.dynamic = false; },
          wrapped("--num-blocks is all there is: a full cache is an error"))
      ->excludes(on);
  add(command, "--arena", "ORDER",
      "block_major (a block is one run of memory, default) or layer_major (each layer is one tensor)",
      [&options](const std::string& word) {
        for (const ArenaOrder order : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor}) {
          if (word != arena_order_name(order)) continue;
          options.arena = order;
          return Status();
        }
        return invalid_argument(fmt::format("\"{}\" is neither block_major nor layer_major", word));
      });
  add_query_path(command, options.query_path);
  add_products(command, options.products);
  add_reproducible(command, options.reproducible);
}

void add_context(CLI::App& command, Tokens& context) {
  add(command, "-c,--context", "N",
      "tokens of the longest sequence, prompt and answer together. Default: the context the model was trained for, "
      "or what memory holds. Larger: longer conversations, more memory when they get long",
      whole(1, kMaxPosition, [&context](int64_t n) { context = Tokens(n); }));
}

/** The folder where blocks are kept, and what else is said of it. */
CLI::Option* add_cache_dir(CLI::App& command, EngineWords& words) {
  const auto folder = [&words]() -> DiskTierOptions& {
    if (!words.cache_dir) words.cache_dir.emplace();
    return *words.cache_dir;
  };
  auto* dir =
      add(command, "--cache-dir", "DIR",
          "keep K and V of prompts and answers in this folder, token ids included, so that they are there after a "
          "restart; made with mode 0700. Default: nowhere",
          [folder](const std::string& word) {
            if (word.empty()) return invalid_argument("\"\" is no folder");
            folder().directory = word;
            return Status();
          });
  add(command, "--cache-disk", "SIZE",
      "most bytes that the folder takes, at least 16MiB, default 20GiB. Larger: older conversations stay",
      [folder](const std::string& word) {
        const auto bytes = read_bytes(word);
        if (bytes.ok()) folder().budget = *bytes;
        return bytes.status();
      })
      ->needs(dir);
  add(command, "--cache-sync", "WHEN",
      "when blocks are safe from a power cut: never (the system writes when it likes), second (default) or each "
      "(with "
      "every write). The end of the process loses nothing in any case",
      [folder](const std::string& word) {
        using Sync = DiskTierOptions::Sync;
        for (const auto& [name, sync] :
             {std::pair("never", Sync::kNever), {"second", Sync::kSecond}, {"each", Sync::kEach}}) {
          if (word != name) continue;
          folder().sync = sync;
          return Status();
        }
        return invalid_argument(fmt::format("\"{}\" is none of never, second, each", word));
      })
      ->needs(dir);
  engine::TierUse& use = words.options.tier;
  add(command, "--cache-ttl", "SECONDS", "blocks are forgotten so long after they were stored, default 0: never",
      whole(0, 1 << 30, [&use](int64_t n) { use.keep = std::chrono::seconds(n); }))
      ->needs(dir);
  add(command, "--cache-min-prefix", "TOKENS",
      "fewer tokens are computed rather than read back, default 256. Larger: fewer reads",
      whole(1, kMaxPosition, [&use](int64_t n) { use.min_prefix = Tokens(n); }))
      ->needs(dir);
  add(command, "--cache-timeout", "SECONDS",
      "a folder that hangs is waited for so long, 1 to 3600, default 2; then prompts are computed",
      whole(1, 3600, [&use](int64_t n) { use.patience = std::chrono::seconds(n); }))
      ->needs(dir);
  return dir;
}

void add_sampling_options(CLI::App& command, engine::SamplingOptions& sampling) {
  // Ranges live in check_sampling alone; the other fields are in range already, so a refusal is about this word.
  const auto real = [&sampling](float engine::SamplingOptions::*field) -> Take {
    return [&sampling, field](const std::string& word) {
      const auto value = read_number(word);
      if (!value.ok()) return value.status();
      sampling.*field = float(*value);
      const Status status = engine::check_sampling(sampling);
      return status.ok() ? status : invalid_argument(fmt::format("\"{}\": {}", word, status.message()));
    };
  };
  add(command, "--temp", "X",
      "temperature, 0 to 100, default 0.8. Larger: more varied; 0: always the likeliest token",
      real(&engine::SamplingOptions::temperature));
  add(command, "--top-k", "N", "only the N likeliest tokens can be drawn, default 40. Larger: more varied; 0: all",
      whole(0, INT32_MAX, [&sampling](int64_t n) { sampling.top_k = int(n); }));
  add(command, "--top-p", "X",
      "only the likeliest tokens that together have this probability, 0 to 1, default 0.95. Larger: more varied; "
      "1: all",
      real(&engine::SamplingOptions::top_p));
  add(command, "--min-p", "X",
      "only tokens at least this likely relative to the likeliest, 0 to 1, default 0.05. Larger: less varied; 0: "
      "off",
      real(&engine::SamplingOptions::min_p));
  add(command, "--repeat-penalty", "X",
      "0.1 to 10, default 1 (off). Larger: the last 64 tokens, the prompt's included, become less likely",
      real(&engine::SamplingOptions::repeat_penalty));
}

void set_help_style(CLI::App& command) { command.get_formatter()->column_width(kHelpColumn); }

void add_scheduler_options(CLI::App& command, engine::SchedulerOptions& scheduler) {
  add(command, "--max-num-seqs", "N",
      "sequences that run at once, 1 to 4096, default 32. Larger: more tokens a second in all, each answer slower",
      whole(1, 4096, [&scheduler](int64_t n) { scheduler.max_num_seqs = n; }));
  add(command, "--max-num-batched-tokens", "N",
      "most tokens of a step, 1 to 65536, default 512, and at least --max-num-seqs. Larger: prompts are faster, "
      "steps longer",
      whole(1, 65536, [&scheduler](int64_t n) { scheduler.max_num_batched_tokens = Tokens(n); }));
  add(command, "--max-queue", "N",
      "sequences that wait beyond those that run, default 128; the next request is refused with 429. Larger: fewer "
      "refusals, longer waits",
      whole(0, 1000000, [&scheduler](int64_t n) { scheduler.max_queue = n; }));
  add(command, "--max-step", "SECONDS",
      "while answers are generated, prompts are computed in chunks that keep a step about as short as this, 0 to "
      "3600, default 0.2; 0: no bound. Larger: prompts are faster, answers stutter more",
      seconds(0, 3600, scheduler.max_step_seconds));
}

/** Who may call, from where. */
void add_access_options(CLI::App& command, ServeOptions& options) {
  add(command, "--api-key-file", "FILE", "keys that clients must show, one a line. Default: none is asked for",
      text(options.api_key_file));
  add(command, "--api-key", "KEY",
      "one key that clients must show. Default: PAGEDKV_API_KEY, where other users of the machine do not see it",
      text(options.api_key))
      ->envname("PAGEDKV_API_KEY");
  add(command, "--cors-origin", "ORIGIN",
      "pages of this origin may call the server, such as https://example.org; *: any. Default: its own page only",
      [&options](const std::string& word) {
        if (word.empty() || word.find_first_of("\r\n ") != std::string::npos)
          return invalid_argument(fmt::format("\"{}\" is no origin", word));
        options.server.cors_origin = word;
        return Status();
      });
  add(command, "--allowed-host", "NAME",
      "a further name by which clients may call the server, such as box.example.org; may be repeated; *: any. "
      "Default: localhost, addresses of this machine, --host",
      [&options](const std::string& word) {
        if (word.empty() || word.find_first_of("\r\n /") != std::string::npos)
          return invalid_argument(fmt::format("\"{}\" is no host's name", word));
        options.server.allowed_hosts.push_back(word);
        return Status();
      });
}

/** What connections and bodies may take, and how long things may last. */
void add_limit_options(CLI::App& command, server::ServerOptions& options) {
  add(command, "--max-connections", "N", "connections that may be open, 1 to 1000000, default 4096; more get 503",
      whole(1, 1000000, [&options](int64_t n) { options.http.max_connections = n; }));
  add(command, "--max-body", "SIZE",
      "longest body of a request, as plain bytes or with KiB, MiB or GiB, default 8 MiB; longer ones get 413",
      [&options](const std::string& word) {
        const auto bytes = read_bytes(word);
        if (bytes.ok()) options.http.max_body_bytes = bytes->n;
        return bytes.status();
      });
  add(command, "--stop-timeout", "SECONDS",
      "requests in progress get so long to finish after SIGTERM or Ctrl-C, 0 to 3600, default 5",
      seconds(0, 3600, options.stop_seconds));
  add(command, "--stall-timeout", "SECONDS",
      "a step that takes longer makes /health answer 503, 1 to 86400, default 60",
      seconds(1, 86400, options.stall_seconds));
}

}  // namespace

void add_run_options(CLI::App& command, RunOptions& options) {
  set_help_style(command);
  add_engine_options(command, options.engine);
  auto* cache_dir = add_cache_dir(command, options.engine);
  add_context(command, options.engine.options.context);
  auto* prompt = add(command, "-p,--prompt", "TEXT", "the question", text(options.prompt));
  auto* file = add(command, "-f,--file", "FILE",
                   "read the question from a file, - for stdin; one newline at its end is dropped",
                   text(options.prompt_file));
  prompt->excludes(file);
  auto* interactive =
      command
          .add_flag("-i,--interactive", options.interactive,
                    wrapped("a conversation: each line of stdin is a message, and only what is new is computed"))
          ->excludes(prompt)
          ->excludes(file);
  add(command, "--session", "NAME",
      "a conversation as with --interactive that is kept in the folder of --cache-dir, and goes on where it ended",
      [&options](const std::string& word) {
        options.session = word;
        return session_path("", word).status();
      })
      ->needs(cache_dir)
      ->excludes(prompt)
      ->excludes(file);
  auto* session = command.get_option("--session");
  auto* system = add(command, "--system", "TEXT", "the system message of the chat template. Default: none",
                     text(options.system));
  command
      .add_flag("--raw", options.raw,
                wrapped("give the prompt to the model as it is: no chat template, and control tokens in it count"))
      ->excludes(system)
      ->excludes(interactive)
      ->excludes(session);
  add(command, "-n,--max-tokens", "N",
      "most tokens of the answer. Default: until the model ends it or the context is full",
      whole(1, kMaxPosition, [&options](int64_t n) { options.max_tokens = Tokens(n); }));
  add(command, "--stop", "TEXT", "end the answer before this text; may be given several times",
      [&options](const std::string& word) {
        if (word.empty()) return invalid_argument("\"\" is empty");
        if (const int64_t at = engine::find_invalid_utf8(word); at >= 0)
          return invalid_argument(fmt::format("the text is not valid UTF-8 at byte {}", at));
        options.stop.push_back(word);
        return Status();
      })
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  add_sampling_options(command, options.sampling);
  add(command, "--seed", "N", "0 to 9223372036854775807, default 0. The same seed gives the same answer",
      whole(0, INT64_MAX, [&options](int64_t n) { options.sampling.seed = uint64_t(n); }));
  command.add_flag("--stats", options.stats, wrapped("all counters of the cache on stderr, after the answer"))
      ->excludes(interactive)
      ->excludes(session);
  add_json(command, options.json, "one JSON object on stdout instead of the answer as it comes")
      ->excludes(interactive)
      ->excludes(session);
  command.final_callback([prompt, file, interactive, session] {
    if (prompt->count() + file->count() + interactive->count() + session->count() == 0)
      throw CLI::RequiredError("--prompt TEXT or --file FILE or --interactive or --session NAME");
  });
}

void add_serve_options(CLI::App& command, ServeOptions& options) {
  set_help_style(command);
  add_engine_options(command, options.engine);
  server::HttpOptions& http = options.server.http;
  add_context(command, options.engine.options.context);
  add(command, "--host", "ADDRESS",
      "the address to listen on, default 127.0.0.1: this machine only. 0.0.0.0 or ::: everybody who can reach it",
      [&http](const std::string& word) {
        http.host = word;
        return Status();
      });
  add(command, "--port", "N", "the port, 0 to 65535, default 8080. 0: any that is free",
      whole(0, 65535, [&http](int64_t n) { http.port = int(n); }));
  add(command, "--served-model-name", "NAME",
      "a name that requests may give as model; may be given several times, the first is shown. Default: the file's "
      "name without .gguf, which is allowed in any case",
      [&options](const std::string& word) {
        if (word.empty() || word.size() > 256) return invalid_argument("a name has 1 to 256 bytes");
        options.served_names.push_back(word);
        return Status();
      })
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  add_cache_dir(command, options.engine);
  add_scheduler_options(command, options.server.scheduler);
  add(command, "-n,--max-tokens", "N",
      "most tokens of an answer when the request does not say. Default: until the model ends it or the context is "
      "full",
      whole(1, kMaxPosition, [&options](int64_t n) { options.server.max_tokens = Tokens(n); }));
  add_access_options(command, options);
  add_limit_options(command, options.server);
  add(command, "--log-format", "FORMAT", "text (default) or json: a line a request on stderr",
      [&options](const std::string& word) {
        if (word != "text" && word != "json")
          return invalid_argument(fmt::format("\"{}\" is neither text nor json", word));
        options.server.log_json = word == "json";
        return Status();
      });
  command.add_flag("--log-prompts", options.server.log_prompts,
                   wrapped("also log the bodies of requests. Off by default: nobody's text is logged"));
  add_sampling_options(command, options.server.sampling);
}

void add_perplexity_options(CLI::App& command, PerplexityOptions& options) {
  set_help_style(command);
  add_engine_options(command, options.engine);
  add(command, "-f,--file", "FILE", "the text, - for stdin", [&options](const std::string& word) {
    options.text_path = word;
    return Status();
  })->required();
  add(command, "-c,--context", "N",
      "tokens of a chunk, 4 to the trained context, default 2048. Each chunk starts anew, its second half is "
      "scored. Larger: more context for each scored token, lower figures",
      whole(4, kMaxPosition, [&options](int64_t n) { options.chunk = Tokens(n); }));
  add(command, "--chunks", "N", "only the first N chunks. Default: all. Larger: surer figures",
      whole(1, kMaxPosition, [&options](int64_t n) { options.chunks = n; }));
  add(command, "--reference", "MODE",
      "also run with K and V stored so (off, f32, ... or K:V), and tell how far the two are apart",
      [&options](const std::string& word) {
        const auto config = parse_kv_quant(word);
        if (!config.ok()) return config.status();
        notice_foreign_spelling(word);
        options.reference = *config;
        return Status();
      });
  add_json(command, options.json, "one JSON object on stdout instead of the table");
}

void add_inspect_options(CLI::App& command, InspectOptions& options) {
  set_help_style(command);
  add_model(command, options.model_path)->required();
  add(command, "-c,--context", "N",
      "tokens of the sequence whose size is shown. Default: the context the model was trained for",
      whole(1, kMaxPosition, [&options](int64_t n) { options.context = Tokens(n); }));
  add_block_size(command, options.block_size);
  add_kv_memory(command, options.kv_memory);
  add_json(command, options.json, "one JSON object on stdout instead of the table");
}

void add_info_options(CLI::App& command, InfoOptions& options) {
  set_help_style(command);
  add_json(command, options.json, "one JSON object on stdout instead of the table");
}

void add_bench_options(CLI::App& command, BenchCommand& bench) {
  bench::BenchOptions& options = bench.options;
  set_help_style(command);
  const bool on_model = bench.kind == BenchCommand::Kind::kModel;
  const bool on_products = bench.kind == BenchCommand::Kind::kProducts;
  if (bench.kind == BenchCommand::Kind::kLimits) {
    add_threads(command, options.threads);
    add_json(command, options.json, "one JSON array of records on stdout; the table goes to stderr");
    return;
  }
  if (on_model) add_model(command, options.model)->required();
  auto* only = add(command, "--case", "NAME", "only this case; may be given several times. Default: all",
                   [&options](const std::string& word) {
                     options.cases.push_back(word);
                     return Status();
                   })
                   ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  if (bench.kind == BenchCommand::Kind::kKernels)
    command
        .add_flag(
            "--full", options.full,
            wrapped("also 1 x 32k, 8 x 4k and 64 x 512 tokens of every shape. Takes about three times as long"))
        ->excludes(only);
  if (on_products)
    command.add_flag("--full", options.full, wrapped("every shape with 33 numbers of tokens from 1 to 600"))
        ->excludes(only);
  if (!on_products)
    add(command, "--kv-quant,--format", "MODE",
        "only this format; may be given several times. Default: f16 q8 q6 q4",
        [&options](const std::string& word) {
          const auto format = parse_format(word);
          if (!format.ok()) return format.status();
          notice_foreign_spelling(word);
          options.formats.push_back(*format);
          return Status();
        })
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  add(command, "--peer", "NAME", "also measure ggml or llama, in turn, in the same process",
      [&options](const std::string& word) {
        if (word != "ggml" && word != "llama")
          return invalid_argument(fmt::format("\"{}\" is neither ggml nor llama", word));
        options.peer = word;
        return Status();
      });
  if (on_model) {
    add(command, "--depth", "N",
        "tokens already stored when timing starts; may be given several times. Default: 16. Larger: attention "
        "counts "
        "for more",
        whole(0, kMaxPosition, [&options](int64_t n) { options.depths.push_back(n); }))
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    add_reproducible(command, options.reproducible);
  }
  if (bench.kind != BenchCommand::Kind::kCache && !on_products) add_query_path(command, options.query_path);
  add_threads(command, options.threads);
  add_json(command, options.json, "one JSON array of records on stdout; the table goes to stderr");
}

Result<engine::EngineOptions> engine_options(const EngineWords& words) {
  engine::EngineOptions options = words.options;
  const auto environment = paged_kv_options_from_env();
  if (!environment.ok()) return environment.status();
  options.kv_formats = words.kv_quant.value_or(environment->kv_quant_config);
  options.kv_formats.k = words.cache_type_k.value_or(options.kv_formats.k);
  options.kv_formats.v = words.cache_type_v.value_or(options.kv_formats.v);
  options.dynamic = words.dynamic.value_or(environment->dynamic);
  if (words.cache_dir)
    if (Status status = engine::use_folder(*words.cache_dir, options.tier); !status.ok()) return status;
  return options;
}

}  // namespace pagedkv::cli
