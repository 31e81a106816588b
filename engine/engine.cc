#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "engine/content_hash.h"
#include "engine/engine_impl.h"
#include "pagedkv/log.h"

namespace pagedkv::engine {
namespace {

constexpr int kMaxThreads = 512;             // ggml's own limit
constexpr int64_t kMaxStepTokens = 1 << 16;  // activations of one step stay within reason
constexpr int64_t kMaxSequences = 1 << 16;   // of one step: each brings a token at least
constexpr int64_t kMostKeyed = 1 << 14;      // blocks that get keys in one step

std::string mib(int64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

Status check_options(const EngineOptions& options, const ModelInfo& info) {
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return invalid_argument("threads is " + std::to_string(options.threads) + ", expected 1 to " +
                            std::to_string(kMaxThreads) + ", or 0 for what the machine offers");
  }
  if (options.chunk.n < 1 || options.chunk.n > kMaxStepTokens) {
    return invalid_argument("chunk is " + std::to_string(options.chunk.n) + " tokens, expected 1 to " +
                            std::to_string(kMaxStepTokens));
  }
  if (options.max_sequences < 1 || options.max_sequences > kMaxSequences) {
    return invalid_argument("max_sequences is " + std::to_string(options.max_sequences) + ", expected 1 to " +
                            std::to_string(kMaxSequences));
  }
  if (options.context.n < 0 || options.kv_memory.n < 0) {
    return invalid_argument("context and kv_memory must not be negative");
  }
  if (options.context.n > info.context_length && !options.allow_past_trained_context) {
    return invalid_argument("context is " + std::to_string(options.context.n) +
                            " tokens, the model was trained for " + std::to_string(info.context_length));
  }
  return Status();
}

// ggml 0.25.3: one column is a dot product a row; two or more may be a tiled product of another order. Formats in
// blocks of 256 (K-quants and most IQ types) have a second tiled product from 8 columns on. Ours have one order.
int64_t reproducible_columns(const Model& model, const Products& products) {
  int64_t columns = 1;
  for (const ggml_tensor* w : model.product_weights())
    if (!products.takes(*w)) columns = std::max<int64_t>(columns, ggml_blck_size(w->type) == 256 ? 8 : 2);
  return columns;
}

CacheOptions cache_options_for(const EngineOptions& options, const ModelInfo& info, std::string fingerprint,
                               Tokens context) {
  CacheOptions out;
  out.groups = info.groups;
  for (GroupSpec& group : out.groups) group.shape.formats = options.kv_formats;
  out.block_size = options.block_size;
  out.num_blocks = options.num_blocks;
  out.dynamic = options.dynamic;
  // 1 rather than 0, which would mean the cache's own default.
  const Bytes left = std::max(machine_memory(info).default_kv_memory, Bytes(1));
  out.kv_memory = options.kv_memory.n > 0 ? options.kv_memory : left;
  out.max_context = context;
  out.longest_chunk = options.chunk;
  out.max_sequences = options.max_sequences;
  out.query_path = options.query_path;
  out.q_heads_per_kv_head = info.n_head / info.groups.front().shape.num_kv_heads;
  out.arena = options.arena;
  if (options.tier.tier != nullptr) out.most_keyed = kMostKeyed;
  out.fingerprint = std::move(fingerprint);
  return out;
}

// Creates the cache. A default num_blocks that does not fit is lowered, as long as the pool may grow again: it is
// only where the pool starts. One that was asked for is not.
Result<std::unique_ptr<Cache>> create_cache(CacheOptions options, const EngineOptions& asked) {
  for (;;) {
    auto cache = Cache::create(options);
    const bool may_lower = asked.dynamic && asked.num_blocks == kDefaultNumBlocks && options.num_blocks.n > 1;
    if (cache.ok() || cache.status().code() != Code::kCapacity || !may_lower) {
      if (cache.ok() && options.num_blocks < asked.num_blocks) {
        notice("the cache starts with " + std::to_string(options.num_blocks.n) + " blocks instead of " +
               std::to_string(asked.num_blocks.n) + ": kv_memory is " + mib(options.kv_memory.n));
      }
      return cache;
    }
    options.num_blocks.n /= 2;
  }
}

// What bounds the pool, as the beginning of a sentence that ends with a count of tokens.
std::string what_holds(const Cache& cache, const EngineOptions& options) {
  if (options.dynamic) return "kv_memory of " + mib(cache.options().kv_memory.n) + " holds";
  return std::to_string(options.num_blocks.n) + " fixed blocks hold";
}

// Of the layers that see all of a context.
int64_t context_bytes(const Cache& cache, Tokens context) {
  int64_t bytes = 0;
  for (int g = 0; g < std::ssize(cache.options().groups); ++g)
    if (cache.options().groups[size_t(g)].sliding_window == 0)
      bytes += cache.image_bytes(g).n * blocks_for(context, cache.options().block_size).n;
  return bytes;
}

Status check_memory(const ModelInfo& info, const Cache& cache) {
  const int64_t limit = machine_memory(info).limit.n;
  const CacheOptions& options = cache.options();
  const int64_t blocks = cache.image_bytes(0).n * options.num_blocks.n;
  if (blocks <= limit - info.weight_bytes) return Status();
  return Status(Code::kCapacity, "weights of " + mib(info.weight_bytes) + " and " +
                                     std::to_string(options.num_blocks.n) + " blocks of " + mib(blocks) +
                                     " do not fit: this process may use " + mib(limit));
}

}  // namespace

Result<std::unique_ptr<Text>> load_text(const ModelInfo& model) {
  auto text = Text::load(model.path);
  if (!text.ok()) return text;
  if ((*text)->vocab_size() != model.vocab_size) {
    return Status(Code::kCorrupt, model.path + ": the vocabulary has " + std::to_string((*text)->vocab_size()) +
                                      " tokens, the embedding " + std::to_string(model.vocab_size));
  }
  return text;
}

Status use_folder(const DiskTierOptions& folder, TierUse& use) {
  auto tier = open_disk_tier(folder);
  if (!tier.ok()) return tier.status();
  use.tier = std::move(*tier);
  use.memo = folder.directory + "/models";
  return Status();
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::load(const EngineOptions& options) {
  auto impl = std::make_unique<Impl>();
  auto model = Model::load(options.model_path);
  if (!model.ok()) return model.status();
  impl->model = std::move(*model);
  const ModelInfo& info = impl->model->info();
  if (Status s = check_options(options, info); !s.ok()) return s;
  if (const int64_t limit = machine_memory(info).limit.n; info.weight_bytes > limit) {
    return Status(Code::kCapacity,
                  "weights of " + mib(info.weight_bytes) + " do not fit: this process may use " + mib(limit));
  }

  // The context is what was asked for, or all that the model was trained for if memory holds it.
  const bool asked = options.context.n > 0;
  impl->context = asked ? options.context : Tokens(info.context_length);
  impl->chunk = options.chunk;
  const int n_threads = options.threads > 0 ? options.threads : default_threads();
  auto products = Products::create(options.products, n_threads);
  if (!products.ok()) return products.status();
  impl->products = std::move(*products);
  if (options.reproducible) impl->min_columns = reproducible_columns(*impl->model, *impl->products);
  const std::string fingerprint = info.fingerprint + impl->products->key(impl->model->product_weights());
  auto cache = create_cache(cache_options_for(options, info, fingerprint, impl->context), options);
  if (!cache.ok()) return cache.status();
  const Tokens room = (*cache)->capacity();
  if (room < impl->context) {
    const std::string why = what_holds(**cache, options) + " " + std::to_string(room.n) + " tokens";
    if (asked) {
      return Status(Code::kCapacity, "a context of " + std::to_string(impl->context.n) + " tokens needs " +
                                         mib(context_bytes(**cache, impl->context)) + " of K and V, " + why +
                                         "; what helps: a smaller --context, more --kv-memory" +
                                         (options.dynamic ? "" : " and --num-blocks") + ", packed --kv-quant");
    }
    if (room.n < 1) return Status(Code::kCapacity, "not even one token fits: " + why);
    notice("context is " + std::to_string(room.n) + " tokens instead of the trained " +
           std::to_string(impl->context.n) + ": " + why);
    impl->context = room;
    cache->reset();  // two would need the memory of two
    cache = create_cache(cache_options_for(options, info, fingerprint, room), options);
    if (!cache.ok()) return cache.status();
  }
  impl->cache = std::move(*cache);
  if (Status s = check_memory(info, *impl->cache); !s.ok()) return s;

  auto text = load_text(info);
  if (!text.ok()) return text.status();
  impl->text = std::move(*text);
  auto graphs = Graphs::create(*impl->model, impl->attention, *impl->products, n_threads);
  if (!graphs.ok()) return graphs.status();
  impl->graphs = std::move(*graphs);
  // The two usual shapes: their memory is taken now, so that a lack of it shows here and not in the first prompt.
  for (int64_t n : {options.chunk.n, int64_t{1}}) {
    auto graph = impl->graphs->get(std::max(n, impl->min_columns), impl->min_columns);
    if (!graph.ok()) return graph.status();
  }
  impl->model->read_in(options.progress);
  if (options.tier.tier != nullptr) {
    impl->tier = std::make_unique<TierTraffic>(
        *impl->cache, TierTrafficOptions{.tier = options.tier.tier,
                                         .min_prefix = options.tier.min_prefix,
                                         .keep = options.tier.keep,
                                         .patience = options.tier.patience,
                                         .identity = known_content_hash(options.model_path, options.tier.memo),
                                         .identify = [path = options.model_path,
                                                      memo = options.tier.memo](const std::atomic<bool>& stop) {
                                           return content_hash(path, memo, stop);
                                         }});
  }
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

const ModelInfo& Engine::model() const { return impl_->model->info(); }
const Text& Engine::text() const { return *impl_->text; }
Cache& Engine::cache() { return *impl_->cache; }
const CacheOptions& Engine::cache_options() const { return impl_->cache->options(); }
Tokens Engine::context() const { return impl_->context; }
TierTraffic* Engine::tier() { return impl_->tier.get(); }
void Engine::close_tier() { impl_->tier.reset(); }
int Engine::threads() const { return impl_->graphs->threads(); }

ProductsInfo Engine::products() const {
  ProductsInfo info;
  for (const ggml_tensor* w : impl_->model->product_weights())
    ++(impl_->products->takes(*w) ? info.n_own : info.n_ggml);
  if (info.n_own > 0) info.isa = impl_->products->isa();
  return info;
}

Result<StepOutput> Engine::step(std::span<const StepInput> inputs) {
  try {
    return run_step(inputs);
  } catch (const std::bad_alloc&) {
    return Status(Code::kNoMemory,
                  "[step] no memory for a step of " + std::to_string(inputs.size()) + " sequences");
  }
}

Result<StepOutput> Engine::run_step(std::span<const StepInput> inputs) {
  Impl& e = *impl_;
  const int64_t vocab_size = model().vocab_size;

  // Everything that can be refused is refused before anything changes: ggml would abort on a token id out of range.
  StepOutput out;
  std::vector<StepRequest> requests;
  int64_t n_tokens = 0, n_rows = 0;
  for (const StepInput& input : inputs) {
    if (input.tokens.empty()) return invalid_argument("[step] an input without tokens");
    for (int32_t token : input.tokens) {
      if (token < 0 || token >= vocab_size) {
        return invalid_argument("[step] token " + std::to_string(token) + ", the vocabulary has " +
                                std::to_string(vocab_size));
      }
    }
    requests.push_back({.sequence = input.sequence, .tokens = input.tokens, .n_tokens = Tokens(0)});
    out.first_row.push_back(n_rows);
    n_tokens += int64_t(input.tokens.size());
    n_rows += input.all_logits ? int64_t(input.tokens.size()) : 1;
  }
  if (n_tokens == 0 || n_tokens > kMaxStepTokens) {
    return invalid_argument("[step] " + std::to_string(n_tokens) + " tokens, expected 1 to " +
                            std::to_string(kMaxStepTokens));
  }
  const int64_t n_columns = std::max(n_tokens, e.min_columns), n_outputs = std::max(n_rows, e.min_columns);
  auto graph = e.graphs->get(n_columns, n_outputs);
  if (!graph.ok()) return graph.status();
  Graph& g = **graph;
  auto plan = e.cache->reserve(requests);
  if (!plan.ok()) return plan.status();
  const auto scratch = e.scratch.get(e.cache->scratch_bytes(*plan, threads(), model().n_head));
  if (!scratch.ok()) return scratch.status();

  auto* tokens = static_cast<int32_t*>(g.tokens->data);
  auto* rows = static_cast<int32_t*>(g.output_rows->data);
  int32_t at = 0;
  for (const StepInput& input : inputs) {
    const auto n = int32_t(input.tokens.size());
    std::memcpy(tokens + at, input.tokens.data(), input.tokens.size_bytes());
    for (int32_t i = input.all_logits ? 0 : n - 1; i < n; ++i) *rows++ = at + i;
    at += n;
  }
  auto* positions = static_cast<int32_t*>(g.positions->data);
  std::memcpy(positions, plan->positions().data(), plan->positions().size_bytes());
  // Padding columns: any token will do. The plan does not know them, so nothing of them is stored or attended to.
  std::fill(tokens + n_tokens, tokens + n_columns, 0);
  std::fill(positions + n_tokens, positions + n_columns, 0);
  std::fill(rows, static_cast<int32_t*>(g.output_rows->data) + n_outputs, 0);

  e.attention.begin(*e.cache, *plan, *scratch);
  Status ran = e.graphs->compute(g);
  Status attended = e.attention.finish();
  for (Status* s : {&attended, &ran}) {
    if (!s->ok()) return *s;
  }
  auto statuses = e.cache->commit(std::move(*plan));
  if (!statuses.ok()) return statuses.status();
  out.statuses = std::move(*statuses);
  out.logits = {static_cast<const float*>(g.logits->data), size_t(n_rows * vocab_size)};
  return out;
}

}  // namespace pagedkv::engine
