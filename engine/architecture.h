// What a family of models is made of: hyper-parameters, the tensors it needs, and its graph. One file a family
// (arch_llama.cc, ...); a new one is added to the list in architecture.cc.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/gguf_file.h"
#include "pagedkv/layout.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

class AttentionNodes;
class ProductNodes;

// Rotary embedding, in the terms of ggml_rope_ext.
struct Rope {
  int mode = 0;  // GGML_ROPE_TYPE_*
  int n_dims = 0;
  int n_ctx_original = 0;
  float freq_base = 10000;
  float freq_scale = 1;
  float ext_factor = 0;
  float attn_factor = 1;
  float beta_fast = 32;
  float beta_slow = 1;
};

// Validated: nothing in here divides by zero or exceeds what the tensors of the file can be.
struct HyperParameters {
  int64_t n_layers = 0;
  int64_t n_embd = 0;
  int64_t n_ff = 0;
  int64_t vocab_size = 0;
  int64_t context_length = 0;
  int64_t n_head = 0;
  int64_t n_head_kv = 0;
  int64_t head_dim_k = 0;
  int64_t head_dim_v = 0;
  float rms_eps = 0;
  Rope rope;                     // of layers that see all
  Rope rope_windowed;            // of layers with a window
  float attention_scale = 0;     // multiplies q.k
  float softcap = 0;             // of the attention logits; 0: off
  float final_softcap = 0;       // of the model's logits; 0: off
  std::vector<int64_t> windows;  // [n_layers] keys a query sees, its own included; 0: all

  const Rope& rope_of(int64_t layer) const { return windows[size_t(layer)] == 0 ? rope : rope_windowed; }
};

// A tensor that an architecture knows. A shape of fewer dimensions means that the others are 1.
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;
  bool required = true;
  bool f32_only = false;  // biases, norms and factors: ggml's element-wise operators take nothing else
};

using Weights = std::unordered_map<std::string, ggml_tensor*>;

// One graph under construction. The helpers emit the same operators as libllama, in the same order, so that the two
// can be compared number by number and neither does more work.
struct GraphBuilder {
  ggml_context* ctx = nullptr;
  ggml_cgraph* graph = nullptr;
  const HyperParameters& h;
  const Weights& weights;
  AttentionNodes& attention;
  ProductNodes& products;
  ggml_tensor* tokens = nullptr;       // [n_tokens] i32
  ggml_tensor* positions = nullptr;    // [n_tokens] i32
  ggml_tensor* output_rows = nullptr;  // [n_rows] i32: which tokens' logits are wanted

  int64_t n_tokens() const { return tokens->ne[0]; }
  ggml_tensor* weight(const std::string& name) const;  // null when the file has none
  ggml_tensor* rms_norm(ggml_tensor* x, const std::string& name) const;
  ggml_tensor* product(ggml_tensor* weight, ggml_tensor* x) const;  // W x
  // W x, plus NAME.bias if the file has one. `name` is without ".weight".
  ggml_tensor* linear(ggml_tensor* x, const std::string& name) const;
  ggml_tensor* rope(ggml_tensor* x, const Rope& r, ggml_tensor* factors) const;  // factors may be null
};

// Stateless; const members: any thread.
class Architecture {
 public:
  virtual ~Architecture() = default;
  virtual std::string_view name() const = 0;
  // Errors: kCorrupt or kUnsupported, with key, value and limit.
  virtual Result<HyperParameters> read(const GgufFile& file) const = 0;
  // Everything a file of this architecture may hold; a tensor not listed is refused, not ignored.
  virtual std::vector<TensorSpec> tensors(const HyperParameters& h) const = 0;
  // Emits the graph and returns the logits, [vocab_size, n_rows] f32.
  virtual ggml_tensor* build(GraphBuilder& b) const = 0;
};

// Sorted by name.
std::vector<const Architecture*> architectures();

// The architecture of a file, or kUnsupported with the list of those that work (also for adapters, vocabularies and
// other GGUF files that are no model).
Result<const Architecture*> find_architecture(const GgufFile& file);

// Every required tensor is there with its shape, and none is unknown. kCorrupt or kUnsupported names the tensor.
Status check_tensors(const GgufFile& file, const Architecture& architecture, const HyperParameters& h);

// Layers with equal windows share a group; full attention comes first. Formats are left at their defaults.
std::vector<GroupSpec> attention_groups(const HyperParameters& h);

// --- helpers for the read() of architectures ------------------------------------------------------------------

// Reads `ARCH.name`, within [least, most]. Missing: `otherwise`, or an error when that is negative.
struct IntegerKey {
  std::string name;
  int64_t least = 1;
  int64_t most = 0;
  int64_t otherwise = -1;
};
Result<int64_t> read_integer(const GgufFile& file, std::string_view architecture, const IntegerKey& key);

// Finite and above 0. Missing: `otherwise`, or an error when there is none.
Result<float> read_positive(const GgufFile& file, const std::string& key, std::optional<float> otherwise);

// Heads, dims, layers, context, vocabulary, epsilon: what the transformer families here have in common.
// Scale by the width of K's heads; rotations and softcaps at their defaults, all windows 0.
Result<HyperParameters> read_common(const GgufFile& file, std::string_view architecture);

// rope.freq_base, rope.dimension_count, rope.scaling.*, as libllama understands them.
Result<Rope> read_rope(const GgufFile& file, std::string_view architecture, const HyperParameters& h, int mode);

// kUnsupported when the key is there with a value above `most`: mixture of experts, and other things not built.
Status refuse_above(const GgufFile& file, const std::string& key, int64_t most, const std::string& what);

const Architecture& gemma3_architecture();
const Architecture& llama_architecture();
const Architecture& qwen2_architecture();
const Architecture& qwen3_architecture();

}  // namespace pagedkv::engine
