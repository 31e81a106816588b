// Runs GGUF models on the paged cache: ggml does the matrix products, pagedkv the attention.
//
// One thread owns an Engine. Its own worker threads live in ggml's pool.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/answer.h"
#include "engine/step_model.h"
#include "engine/text.h"
#include "pagedkv/cache.h"
#include "pagedkv/disk_tier.h"
#include "pagedkv/format.h"
#include "pagedkv/layout.h"
#include "pagedkv/stats.h"
#include "pagedkv/status.h"
#include "pagedkv/tier.h"
#include "pagedkv/units.h"

namespace pagedkv::engine {

// What a model file says about itself, read from its header (the fingerprint also samples the weights).
struct ModelInfo {
  std::string path;
  std::string architecture;  // "llama"
  std::string name;
  int64_t n_layers = 0;
  int64_t n_embd = 0;
  int64_t n_head = 0;  // query heads, the same in all layers
  int64_t vocab_size = 0;
  int64_t context_length = 0;  // trained context
  int64_t weight_bytes = 0;
  std::vector<GroupSpec> groups;  // formats left at their defaults
  std::string fingerprint;        // identifies weights and rotary setting; part of every cache key
};

// Errors: kNotFound, kCorrupt (with the offset or key, value and limit), kUnsupported (lists what works).
Result<ModelInfo> read_model_info(const std::string& path);

// The vocabulary that goes with it. Errors: kCorrupt.
Result<std::unique_ptr<Text>> load_text(const ModelInfo& model);

// Memory this process may use: min(RAM, cgroup limit), and what the KV cache gets of it by default.
struct MachineMemory {
  Bytes limit;
  Bytes default_kv_memory;  // half of limit minus the weights, or an eighth of what large weights leave
  Bytes ram{0};
  std::optional<Bytes> cgroup = std::nullopt;  // tightest limit of the own cgroup and those above
};
MachineMemory machine_memory(const ModelInfo& model);

// Threads by CPU affinity and cgroup quota.
int default_threads();

// The ggml that runs: its version, and the name and value of each feature that its CPU code was built with.
struct GgmlBuild {
  std::string version;
  std::vector<std::pair<std::string, std::string>> features;
};
GgmlBuild ggml_build();

inline constexpr Blocks kDefaultNumBlocks{1024};

// Who multiplies with quantized weights: pagedkv where it is the faster one, or ggml always.
enum class ProductsChoice : uint8_t { kAuto, kGgml };
std::string_view products_choice_name(ProductsChoice choice);
// "auto" or "ggml". Errors: kInvalidArgument.
Result<ProductsChoice> parse_products_choice(const std::string& word);
// Weights that products read, by who multiplies with them.
struct ProductsInfo {
  std::string isa;  // the entry of ours; empty where no weight is
  int64_t n_own = 0;
  int64_t n_ggml = 0;
};
// The weight types that are ours on this machine, as ggml names them; empty where it has no instruction set of
// ours. Errors: kInvalidArgument (PAGEDKV_ISA).
Result<std::vector<std::string>> own_product_types();

// Where blocks go beside the pool, to be there after a restart.
struct TierUse {
  std::shared_ptr<Tier> tier = nullptr;  // null: nowhere
  Tokens min_prefix{256};                // a shorter beginning of a prompt is computed rather than read back
  std::chrono::seconds keep{0};          // time to live of what is stored; 0: until it makes room
  std::chrono::milliseconds patience{
      2000};         // for an answer, a read or a write of the tier: it is done without then
  std::string memo;  // a file that keeps the hashes of models' files; empty: none
};

// Makes `use` one of this folder, which also keeps the memo. Errors: those of open_disk_tier.
Status use_folder(const DiskTierOptions& folder, TierUse& use);

struct EngineOptions {
  std::string model_path;
  Tokens context{0};  // longest sequence; 0: the trained context, or less when memory is short (reported)
  int threads = 0;    // 0: default_threads()
  KvQuantConfig kv_formats = {};
  Tokens block_size{16};
  // Where the pool starts. The default is lowered (and that reported) where it does not fit and `dynamic` is on.
  Blocks num_blocks = kDefaultNumBlocks;
  Bytes kv_memory{0};  // 0: machine_memory().default_kv_memory
  bool dynamic = true;
  QueryPath query_path = QueryPath::kAuto;
  ProductsChoice products = ProductsChoice::kAuto;
  ArenaOrder arena = ArenaOrder::kBlockMajor;
  Tokens chunk{512};          // most prompt tokens a step takes
  int64_t max_sequences = 1;  // that run at once; sizes the floor of window groups
  // Equal tokens give equal logits to the bit, however they are chunked, batched, forked or found in the cache. So
  // they do anyway where every product is ours; ggml's take single tokens as they take several then, which costs
  // decode speed (docs/numerics.md).
  bool reproducible = false;
  bool allow_past_trained_context = false;             // benchmarks only
  std::function<void(double fraction)> progress = {};  // while weights are read in; may be empty
  TierUse tier = {};
};

struct GenerateRequest {
  std::vector<int32_t> prompt;
  Tokens max_tokens{-1};  // < 0: until the context is full
  SamplingOptions sampling;
  std::vector<std::string> stop;
  bool own_text = false;  // AnswerOptions::own_text
};

struct GenerateResult {
  std::string text;
  std::vector<int32_t> tokens;  // of the answer, without the one that ended it
  FinishReason finish_reason = FinishReason::kStop;
  int64_t tokens_in = 0;
  int64_t tokens_reused = 0;  // prompt tokens taken from the cache
  int64_t tokens_out = 0;
  double prefill_seconds = 0;  // from the first prompt token to the first logits
  double decode_seconds = 0;   // of the tokens after the first
  Blocks blocks_held;          // by the sequence when it ended, all groups together
  Bytes bytes_held;            // of those blocks, padding included
  double prefill_tok_s() const;
  double decode_tok_s() const;
};

// How well a text is predicted: chunks without overlap, each on its own; the first token of a chunk is replaced by
// BOS where the vocabulary wants one, and the tokens of its second half are scored. llama.cpp's convention: figures
// compare.
struct FidelityRequest {
  std::span<const int32_t> tokens;  // of the whole text; what does not fill a chunk is left out
  Tokens chunk{2048};               // 4 to the engine's context
  int64_t max_chunks = 0;           // 0: all
  // Also computed with K and V stored so, and compared with; in the same run, by the same threads and weights.
  std::optional<KvQuantConfig> reference = std::nullopt;
  std::function<void(double fraction)> progress = {};  // may be empty
};

struct FidelityResult {
  int64_t chunks = 0;
  int64_t tokens_scored = 0;
  double ppl = 0;  // exp(mean negative log-likelihood)
  struct AgainstReference {
    double ppl = 0;       // of the reference
    double kld_mean = 0;  // divergence of the next-token distributions, nats: sum p_ref * log(p_ref / p)
    double kld_p999 = 0;  // 99.9 % of the scored tokens have less
    double top1 = 0;      // percent of the scored tokens whose likeliest next token is the reference's
  };
  std::optional<AgainstReference> reference = std::nullopt;
};

class Engine : public StepModel {
 public:
  // Errors: those of read_model_info, and kCapacity when weights and num_blocks do not fit.
  static Result<std::unique_ptr<Engine>> load(const EngineOptions& options);
  ~Engine() override;

  const ModelInfo& model() const;
  const Text& text() const override;
  Cache& cache() override;
  const CacheOptions& cache_options() const;
  Tokens context() const override;
  TierTraffic* tier() override;
  // Writes what waits for the tier, and lets go of it. Requires: no scheduler runs.
  void close_tier();
  int threads() const;
  ProductsInfo products() const;

  Result<StepOutput> step(std::span<const StepInput> inputs) override;

  // Answers one prompt. `on_text` gets the answer as it comes and returns false to cancel; it is also called, with
  // empty text, between the chunks of a long prompt. The sequence is released at the end; its blocks stay cached.
  // Errors: kInvalidArgument (prompt empty or not shorter than the context, sampling, a grammar that nothing fits),
  // kCapacity, kNoMemory, kNotFinite.
  Result<GenerateResult> generate(const GenerateRequest& request,
                                  const std::function<bool(std::string_view)>& on_text = {});

  // Scores a text. Nothing of it stays cached. Errors: kInvalidArgument (chunk, more chunks than the text has, a
  // reference format that cannot hold the head_dim), kCapacity, kNotFinite.
  Result<FidelityResult> fidelity(const FidelityRequest& request);

 private:
  Result<StepOutput> run_step(std::span<const StepInput> inputs);

  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv::engine
