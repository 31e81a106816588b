#include "engine/architecture.h"

#include <ggml-cpu.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "engine/product_node.h"

namespace pagedkv::engine {
namespace {

constexpr int64_t kMaxLayers = 512;  // libllama's own limit
constexpr int64_t kMaxWidth = 1 << 20;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxContext = std::numeric_limits<int32_t>::max();  // positions are int32

Status corrupt(std::string message) { return Status(Code::kCorrupt, std::move(message)); }
Status unsupported(std::string message) { return Status(Code::kUnsupported, std::move(message)); }

std::string names_of_architectures() {
  std::string names;
  for (const Architecture* a : architectures()) names += (names.empty() ? "" : ", ") + std::string(a->name());
  return names;
}

// One more than the highest N of the tensors called "blk.N.*".
int64_t layers_with_tensors(const GgufFile& file) {
  int64_t n = 0;
  for (const GgufTensor& t : file.tensors()) {
    if (!t.name.starts_with("blk.")) continue;
    int64_t index = 0;
    size_t i = 4;
    for (; i < t.name.size() && t.name[i] >= '0' && t.name[i] <= '9' && index <= kMaxLayers; ++i) {
      index = index * 10 + (t.name[i] - '0');
    }
    if (i > 4 && i < t.name.size() && t.name[i] == '.') n = std::max(n, index + 1);
  }
  return n;
}

// The vocabulary is as large as the embedding has rows; the token list must agree.
Result<int64_t> read_vocab_size(const GgufFile& file) {
  const GgufTensor* embedding = file.tensor("token_embd.weight");
  if (!embedding) return corrupt("tensor 'token_embd.weight' is missing");
  const int64_t vocab_size = embedding->ne[1];
  const GgufValue* tokens = file.find("tokenizer.ggml.tokens");
  if (!tokens) return corrupt("key 'tokenizer.ggml.tokens' is missing: the file has no vocabulary");
  if (tokens->type != GgufType::kArray || tokens->element_type != GgufType::kString ||
      tokens->count != vocab_size) {
    return corrupt("key 'tokenizer.ggml.tokens' must be an array of " + std::to_string(vocab_size) +
                   " strings, one for each row of tensor 'token_embd.weight', but is " +
                   (tokens->type == GgufType::kArray
                        ? std::to_string(tokens->count) + " of type " + gguf_type_name(tokens->element_type)
                        : "of type " + std::string(gguf_type_name(tokens->type))));
  }
  if (vocab_size > std::numeric_limits<int32_t>::max()) {
    return corrupt("tensor 'token_embd.weight' has " + std::to_string(vocab_size) +
                   " rows, token ids have 31 bits");
  }
  return vocab_size;
}

Status refuse_arrays_of_heads(const GgufFile& file, const std::string& prefix) {
  const GgufValue* heads = file.find(prefix + ".attention.head_count");
  const GgufValue* kv_heads = file.find(prefix + ".attention.head_count_kv");
  for (const GgufValue* value : {heads, kv_heads}) {
    if (value && value->type == GgufType::kArray) {
      return unsupported("key '" + prefix + ".attention.head_count" + (value == heads ? "" : "_kv") +
                         "' differs by layer (an array); only one count for all layers is supported");
    }
  }
  return Status();
}

}  // namespace

// --- the list -------------------------------------------------------------------------------------------------

std::vector<const Architecture*> architectures() {
  return {&gemma3_architecture(), &llama_architecture(), &qwen2_architecture(), &qwen3_architecture()};
}

Result<const Architecture*> find_architecture(const GgufFile& file) {
  auto type = file.text("general.type");
  if (!type.ok()) return type.status();
  if (type->has_value() && **type != "model") {
    return unsupported("the file is of general.type '" + (*type)->substr(0, 40) +
                       "'; only whole models are supported (architectures: " + names_of_architectures() + ")");
  }
  auto name = file.text("general.architecture");
  if (!name.ok()) return name.status();
  if (!name->has_value()) return corrupt("key 'general.architecture' is missing");
  for (const Architecture* a : architectures()) {
    if (a->name() == **name) return a;
  }
  return unsupported("architecture '" + (*name)->substr(0, 40) +
                     "' is not supported; these are: " + names_of_architectures());
}

// --- hyper-parameters -----------------------------------------------------------------------------------------

Result<int64_t> read_integer(const GgufFile& file, std::string_view architecture, const IntegerKey& key) {
  const std::string name = std::string(architecture) + "." + key.name;
  auto value = file.integer(name);
  if (!value.ok()) return value.status();
  if (!value->has_value()) {
    if (key.otherwise >= 0) return key.otherwise;
    return corrupt("key '" + name + "' is missing");
  }
  if (**value < key.least || **value > key.most) {
    return corrupt("key '" + name + "' is " + std::to_string(**value) + ", expected " + std::to_string(key.least) +
                   " to " + std::to_string(key.most));
  }
  return **value;
}

Status refuse_above(const GgufFile& file, const std::string& key, int64_t most, const std::string& what) {
  auto value = file.integer(key);
  if (!value.ok()) return value.status();
  if (value->value_or(most) <= most) return Status();
  return unsupported(what + " is not supported (key '" + key + "' is " + std::to_string(**value) + ")");
}

Result<float> read_positive(const GgufFile& file, const std::string& key, std::optional<float> otherwise) {
  auto value = file.real(key);
  if (!value.ok()) return value.status();
  if (!value->has_value()) {
    if (otherwise) return *otherwise;
    return corrupt("key '" + key + "' is missing");
  }
  const auto number = float(**value);
  if (!(number > 0) || !std::isfinite(number)) {
    return corrupt("key '" + key + "' is " + std::to_string(**value) + ", expected a finite number above 0");
  }
  return number;
}

Result<HyperParameters> read_common(const GgufFile& file, std::string_view architecture) {
  HyperParameters h;
  Status problem;
  // Reads in order and stops at the first problem.
  auto integer = [&](const IntegerKey& key) -> int64_t {
    if (!problem.ok()) return 0;
    auto value = read_integer(file, architecture, key);
    if (!value.ok()) problem = value.status();
    return value.ok() ? *value : 0;
  };
  const std::string prefix(architecture);

  if (Status status = refuse_arrays_of_heads(file, prefix); !status.ok()) return status;
  h.context_length = integer({.name = "context_length", .most = kMaxContext});
  h.n_embd = integer({.name = "embedding_length", .most = kMaxWidth});
  h.n_layers = integer({.name = "block_count", .most = kMaxLayers});
  h.n_ff = integer({.name = "feed_forward_length", .most = kMaxWidth * 16});
  h.n_head = integer({.name = "attention.head_count", .most = kMaxWidth});
  h.n_head_kv = integer({.name = "attention.head_count_kv", .most = kMaxWidth, .otherwise = h.n_head});
  if (!problem.ok()) return problem;
  if (const int64_t found = layers_with_tensors(file); h.n_layers != found) {
    return corrupt("key '" + prefix + ".block_count' is " + std::to_string(h.n_layers) +
                   ", but the file holds tensors of " + std::to_string(found) + " layers");
  }
  if (h.n_head_kv > h.n_head || h.n_head % h.n_head_kv != 0) {
    return corrupt("key '" + prefix + ".attention.head_count_kv' is " + std::to_string(h.n_head_kv) +
                   ", expected a divisor of '" + prefix + ".attention.head_count', " + std::to_string(h.n_head));
  }
  const bool divides = h.n_embd % h.n_head == 0;
  if (!divides && !file.find(prefix + ".attention.key_length")) {
    return corrupt("key '" + prefix + ".embedding_length' is " + std::to_string(h.n_embd) +
                   ", not a multiple of '" + prefix + ".attention.head_count', " + std::to_string(h.n_head));
  }
  // Not 0: a missing key_length must not read as an error of the default.
  const int64_t head_dim = std::max<int64_t>(h.n_embd / h.n_head, 1);
  h.head_dim_k = integer({.name = "attention.key_length", .most = kMaxHeadDim, .otherwise = head_dim});
  h.head_dim_v = integer({.name = "attention.value_length", .most = kMaxHeadDim, .otherwise = head_dim});
  if (!problem.ok()) return problem;
  if (h.head_dim_k > kMaxHeadDim || h.head_dim_v > kMaxHeadDim) {
    return unsupported("heads of " + std::to_string(std::max(h.head_dim_k, h.head_dim_v)) + " dimensions ('" +
                       prefix + ".embedding_length' / '" + prefix + ".attention.head_count'); at most " +
                       std::to_string(kMaxHeadDim) + " are supported");
  }

  auto epsilon = read_positive(file, prefix + ".attention.layer_norm_rms_epsilon", std::nullopt);
  if (!epsilon.ok()) return epsilon.status();
  if (*epsilon >= 1) {
    return corrupt("key '" + prefix + ".attention.layer_norm_rms_epsilon' is " + std::to_string(*epsilon) +
                   ", expected less than 1");
  }
  h.rms_eps = *epsilon;

  auto causal = file.boolean(prefix + ".attention.causal");
  if (!causal.ok()) return causal.status();
  if (!causal->value_or(true))
    return unsupported("an embedding model (key '" + prefix + ".attention.causal' is false)");
  if (Status s = refuse_above(file, prefix + ".expert_count", 0, "a mixture of experts"); !s.ok()) return s;

  auto vocab_size = read_vocab_size(file);
  if (!vocab_size.ok()) return vocab_size.status();
  h.vocab_size = *vocab_size;
  h.attention_scale = 1.0f / std::sqrt(float(h.head_dim_k));
  h.windows.assign(size_t(h.n_layers), 0);
  return h;
}

Result<Rope> read_rope(const GgufFile& file, std::string_view architecture, const HyperParameters& h, int mode) {
  const std::string prefix(architecture);
  Rope rope;
  rope.mode = mode;
  auto n_dims = read_integer(file, architecture,
                             {.name = "rope.dimension_count", .most = h.head_dim_k, .otherwise = h.head_dim_k});
  if (!n_dims.ok()) return n_dims.status();
  if (*n_dims % 2 != 0) {
    return corrupt("key '" + prefix + ".rope.dimension_count' is " + std::to_string(*n_dims) +
                   ", expected an even number");
  }
  rope.n_dims = int(*n_dims);
  auto base = read_positive(file, prefix + ".rope.freq_base", 10000.0f);
  if (!base.ok()) return base.status();
  rope.freq_base = *base;

  auto original = read_integer(file, architecture,
                               {.name = "rope.scaling.original_context_length",
                                .least = 0,
                                .most = kMaxContext,
                                .otherwise = h.context_length});
  if (!original.ok()) return original.status();
  rope.n_ctx_original = int(*original == 0 ? h.context_length : *original);

  auto scaling = file.text(prefix + ".rope.scaling.type");
  if (!scaling.ok()) return scaling.status();
  const std::string type = scaling->value_or("linear");
  if (type != "none" && type != "linear" && type != "yarn") {
    return unsupported("RoPE scaling '" + type.substr(0, 40) + "' (key '" + prefix +
                       ".rope.scaling.type'); supported are: none, linear, yarn");
  }
  // The old name is read when the new one is missing; 0 means unscaled, as in libllama.
  const std::string factor_key = prefix + ".rope.scaling.factor", old_key = prefix + ".rope.scale_linear";
  const std::string& key = file.find(factor_key) ? factor_key : old_key;
  auto factor = file.real(key);
  if (!factor.ok()) return factor.status();
  if (factor->has_value() && (**factor < 0 || **factor > 1e6 || (**factor != 0 && **factor < 1e-6))) {
    return corrupt("key '" + key + "' is " + std::to_string(**factor) + ", expected 0 (unscaled) or 1e-6 to 1e6");
  }
  const auto scale = float(factor->value_or(0));
  if (type != "none" && scale != 0) rope.freq_scale = 1.0f / scale;

  auto attn_factor = read_positive(file, prefix + ".rope.scaling.attn_factor", 1.0f);
  if (!attn_factor.ok()) return attn_factor.status();
  if (type == "yarn") {
    // ggml scales by 1 + 0.1 ln(factor) on its own; what remains is what libllama hands it: 1 for factors above 1.
    const float stretch = 1.0f / rope.freq_scale;
    const float wanted = stretch <= 1.0f ? 1.0f : 0.1f * std::log(stretch) + 1.0f;
    rope.ext_factor = 1;
    rope.attn_factor = wanted * (1.0f / (1.0f + 0.1f * std::log(stretch)));
  }
  rope.attn_factor *= *attn_factor;
  return rope;
}

// --- tensors --------------------------------------------------------------------------------------------------

Status check_tensors(const GgufFile& file, const Architecture& architecture, const HyperParameters& h) {
  std::unordered_map<std::string, const TensorSpec*> known;
  const std::vector<TensorSpec> specs = architecture.tensors(h);
  for (const TensorSpec& spec : specs) known.emplace(spec.name, &spec);
  for (const GgufTensor& t : file.tensors()) {
    const auto it = known.find(t.name);
    if (it == known.end()) {
      return unsupported("tensor '" + t.name + "' " + shape_text({t.ne, size_t(t.n_dims)}) +
                         " is not part of architecture " + std::string(architecture.name()) + " as supported here");
    }
    const TensorSpec& spec = *it->second;
    for (size_t d = 0; d < 4; ++d) {
      const int64_t expected = d < spec.shape.size() ? spec.shape[d] : 1;
      if (t.ne[d] != expected) {
        return corrupt("tensor '" + t.name + "' has shape " + shape_text({t.ne, size_t(t.n_dims)}) + ", expected " +
                       shape_text(spec.shape));
      }
    }
    if (spec.f32_only && t.type != GGML_TYPE_F32) {
      return unsupported("tensor '" + t.name + "' is of type " + ggml_type_name(t.type) +
                         ", only f32 is supported");
    }
    // ggml can neither multiply nor look up rows of types without a dot product (i32, f64, q8_1, ...), and aborts.
    if (!ggml_get_type_traits_cpu(t.type)->vec_dot) {
      return unsupported("tensor '" + t.name + "' is of type " + ggml_type_name(t.type) +
                         ", which is no format of weights");
    }
  }
  for (const TensorSpec& spec : specs) {
    if (spec.required && !file.tensor(spec.name)) {
      return corrupt("tensor '" + spec.name + "' is missing, expected with shape " + shape_text(spec.shape));
    }
  }
  return Status();
}

std::vector<GroupSpec> attention_groups(const HyperParameters& h) {
  std::vector<GroupSpec> groups;
  std::vector<int64_t> windows = h.windows;
  std::sort(windows.begin(), windows.end());  // 0, full attention, first
  windows.erase(std::unique(windows.begin(), windows.end()), windows.end());
  for (int64_t window : windows) {
    GroupSpec group;
    group.shape = {
        .num_kv_heads = h.n_head_kv, .head_dim_k = h.head_dim_k, .head_dim_v = h.head_dim_v, .formats = {}};
    group.sliding_window = window;
    for (size_t layer = 0; layer < h.windows.size(); ++layer) {
      if (h.windows[layer] == window) group.layers.push_back(int(layer));
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

// --- graph ----------------------------------------------------------------------------------------------------

ggml_tensor* GraphBuilder::weight(const std::string& name) const {
  const auto it = weights.find(name);
  return it == weights.end() ? nullptr : it->second;
}

ggml_tensor* GraphBuilder::rms_norm(ggml_tensor* x, const std::string& name) const {
  return ggml_mul(ctx, ggml_rms_norm(ctx, x, h.rms_eps), weight(name + ".weight"));
}

ggml_tensor* GraphBuilder::product(ggml_tensor* weight, ggml_tensor* x) const {
  return products.build(ctx, weight, x);
}

ggml_tensor* GraphBuilder::linear(ggml_tensor* x, const std::string& name) const {
  ggml_tensor* y = product(weight(name + ".weight"), x);
  ggml_tensor* bias = weight(name + ".bias");
  return bias ? ggml_add(ctx, y, bias) : y;
}

ggml_tensor* GraphBuilder::rope(ggml_tensor* x, const Rope& r, ggml_tensor* factors) const {
  return ggml_rope_ext(ctx, x, positions, factors, r.n_dims, r.mode, r.n_ctx_original, r.freq_base, r.freq_scale,
                       r.ext_factor, r.attn_factor, r.beta_fast, r.beta_slow);
}

}  // namespace pagedkv::engine
