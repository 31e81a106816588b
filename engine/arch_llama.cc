// Architecture "llama": Llama 1 to 3, Mistral 7B, SmolLM2 and other models with the same graph.
//
// As in libllama, a sliding window in the file is not applied: Mistral 7B v0.1, the one such model, was trained
// with it, and every GGUF engine runs it with full attention.
#include "engine/architecture.h"
#include "engine/attention_node.h"

namespace pagedkv::engine {
namespace {

std::string layer_name(int64_t layer, const char* rest) { return "blk." + std::to_string(layer) + "." + rest; }

class Llama : public Architecture {
 public:
  std::string_view name() const override { return "llama"; }

  Result<HyperParameters> read(const GgufFile& file) const override {
    auto h = read_common(file, name());
    if (!h.ok()) return h;
    auto rope = read_rope(file, name(), *h, GGML_ROPE_TYPE_NORMAL);
    if (!rope.ok()) return rope.status();
    h->rope = *rope;
    // libllama refuses these too: there is nothing to compare such a model with.
    if (h->rope.n_dims != h->head_dim_k) {
      return Status(Code::kUnsupported, "key 'llama.rope.dimension_count' is " + std::to_string(h->rope.n_dims) +
                                            "; only the head dimension, " + std::to_string(h->head_dim_k) +
                                            ", is supported");
    }
    if (h->head_dim_v != h->head_dim_k) {
      return Status(Code::kUnsupported, "key 'llama.attention.value_length' is " + std::to_string(h->head_dim_v) +
                                            "; only that of keys, " + std::to_string(h->head_dim_k) +
                                            ", is supported");
    }
    return h;
  }

  std::vector<TensorSpec> tensors(const HyperParameters& h) const override {
    const int64_t n_q = h.n_head * h.head_dim_k, n_k = h.n_head_kv * h.head_dim_k, n_v = h.n_head_kv * h.head_dim_v;
    std::vector<TensorSpec> specs = {
        {.name = "token_embd.weight", .shape = {h.n_embd, h.vocab_size}},
        {.name = "output_norm.weight", .shape = {h.n_embd}, .f32_only = true},
        {.name = "output.weight", .shape = {h.n_embd, h.vocab_size}, .required = false},  // else the embedding
        {.name = "rope_freqs.weight", .shape = {h.rope.n_dims / 2}, .required = false, .f32_only = true},
    };
    for (int64_t layer = 0; layer < h.n_layers; ++layer) {
      const struct {
        const char* name;
        int64_t in, out;
      } matrices[] = {
          {"attn_q", h.n_embd, n_q},      {"attn_k", h.n_embd, n_k},      {"attn_v", h.n_embd, n_v},
          {"attn_output", n_q, h.n_embd}, {"ffn_gate", h.n_embd, h.n_ff}, {"ffn_up", h.n_embd, h.n_ff},
          {"ffn_down", h.n_ff, h.n_embd},
      };
      for (const auto& m : matrices) {
        const std::string base = layer_name(layer, m.name);
        specs.push_back({.name = base + ".weight", .shape = {m.in, m.out}});
        specs.push_back({.name = base + ".bias", .shape = {m.out}, .required = false, .f32_only = true});
      }
      for (const char* norm : {"attn_norm.weight", "ffn_norm.weight"}) {
        specs.push_back({.name = layer_name(layer, norm), .shape = {h.n_embd}, .f32_only = true});
      }
    }
    return specs;
  }

  ggml_tensor* build(GraphBuilder& b) const override {
    const HyperParameters& h = b.h;
    ggml_tensor* embedding = b.weight("token_embd.weight");
    ggml_tensor* factors = b.weight("rope_freqs.weight");        // Llama 3; null for the others
    ggml_tensor* x = ggml_get_rows(b.ctx, embedding, b.tokens);  // [n_embd, n_tokens]
    for (int64_t layer = 0; layer < h.n_layers; ++layer) {
      ggml_tensor* normed = b.rms_norm(x, layer_name(layer, "attn_norm"));
      ggml_tensor* q = heads(b, b.linear(normed, layer_name(layer, "attn_q")), h.head_dim_k);
      ggml_tensor* k = heads(b, b.linear(normed, layer_name(layer, "attn_k")), h.head_dim_k);
      ggml_tensor* v = heads(b, b.linear(normed, layer_name(layer, "attn_v")), h.head_dim_v);
      q = b.rope(q, factors);
      k = b.rope(k, factors);
      ggml_tensor* attended = b.attention.build(b, static_cast<int>(layer), q, k, v);
      ggml_tensor* out = b.linear(attended, layer_name(layer, "attn_output"));
      // Behind the last attention only the rows whose logits are wanted go on.
      if (layer == h.n_layers - 1) {
        out = ggml_get_rows(b.ctx, out, b.output_rows);
        x = ggml_get_rows(b.ctx, x, b.output_rows);
      }
      x = ggml_add(b.ctx, out, x);
      normed = b.rms_norm(x, layer_name(layer, "ffn_norm"));
      ggml_tensor* up = b.linear(normed, layer_name(layer, "ffn_up"));
      ggml_tensor* gate = b.linear(normed, layer_name(layer, "ffn_gate"));
      ggml_tensor* ff = ggml_swiglu_split(b.ctx, gate, up);
      x = ggml_add(b.ctx, b.linear(ff, layer_name(layer, "ffn_down")), x);
    }
    x = b.rms_norm(x, "output_norm");
    ggml_tensor* head = b.weight("output.weight");
    return ggml_mul_mat(b.ctx, head ? head : embedding, x);  // [vocab_size, n_rows]
  }

 private:
  // [n_heads * dim, n_tokens] -> [dim, n_heads, n_tokens], a view
  static ggml_tensor* heads(const GraphBuilder& b, ggml_tensor* x, int64_t dim) {
    return ggml_reshape_3d(b.ctx, x, dim, x->ne[0] / dim, x->ne[1]);
  }
};

}  // namespace

const Architecture& llama_architecture() {
  static const Llama instance;
  return instance;
}

}  // namespace pagedkv::engine
