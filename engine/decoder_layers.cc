#include "engine/decoder_layers.h"

#include "engine/attention_node.h"

namespace pagedkv::engine {
namespace {

// [n_heads * dim, n_tokens] -> [dim, n_heads, n_tokens], a view
ggml_tensor* heads(const GraphBuilder& b, ggml_tensor* x, int64_t dim) {
  return ggml_reshape_3d(b.ctx, x, dim, x->ne[0] / dim, x->ne[1]);
}

}  // namespace

std::string layer_name(int64_t layer, const char* rest) { return "blk." + std::to_string(layer) + "." + rest; }

// --- reading and checking -------------------------------------------------------------------------------------

Status check_heads(std::string_view architecture, const HyperParameters& h, Rotated rotated) {
  const std::string prefix(architecture);
  if (rotated == Rotated::kWholeHead && h.rope.n_dims != h.head_dim_k) {
    return Status(Code::kUnsupported, "key '" + prefix + ".rope.dimension_count' is " +
                                          std::to_string(h.rope.n_dims) + "; only the head dimension, " +
                                          std::to_string(h.head_dim_k) + ", is supported");
  }
  if (h.head_dim_v != h.head_dim_k) {
    return Status(Code::kUnsupported, "key '" + prefix + ".attention.value_length' is " +
                                          std::to_string(h.head_dim_v) + "; only that of keys, " +
                                          std::to_string(h.head_dim_k) + ", is supported");
  }
  return Status();
}

Result<HyperParameters> read_decoder(const GgufFile& file, std::string_view architecture, int rope_mode,
                                     Rotated rotated) {
  auto h = read_common(file, architecture);
  if (!h.ok()) return h;
  auto rope = read_rope(file, architecture, *h, rope_mode);
  if (!rope.ok()) return rope.status();
  h->rope = *rope;
  if (Status s = check_heads(architecture, *h, rotated); !s.ok()) return s;
  return h;
}

std::vector<TensorSpec> decoder_tensors(const HyperParameters& h, const LayerParts& parts) {
  const int64_t n_q = h.n_head * h.head_dim_k, n_k = h.n_head_kv * h.head_dim_k, n_v = h.n_head_kv * h.head_dim_v;
  const bool all = parts.biases == LayerParts::Biases::kOfEveryMatrix;
  std::vector<TensorSpec> specs = {
      {.name = "token_embd.weight", .shape = {h.n_embd, h.vocab_size}},
      {.name = "output_norm.weight", .shape = {h.n_embd}, .f32_only = true},
      {.name = "output.weight", .shape = {h.n_embd, h.vocab_size}, .required = false},  // else the embedding
  };
  for (int64_t layer = 0; layer < h.n_layers; ++layer) {
    const struct {
      const char* name;
      int64_t in, out;
      bool bias;
    } matrices[] = {
        {"attn_q", h.n_embd, n_q, true},     {"attn_k", h.n_embd, n_k, true},
        {"attn_v", h.n_embd, n_v, true},     {"attn_output", h.n_head * h.head_dim_v, h.n_embd, all},
        {"ffn_gate", h.n_embd, h.n_ff, all}, {"ffn_up", h.n_embd, h.n_ff, all},
        {"ffn_down", h.n_ff, h.n_embd, all},
    };
    for (const auto& m : matrices) {
      const std::string base = layer_name(layer, m.name);
      specs.push_back({.name = base + ".weight", .shape = {m.in, m.out}});
      if (!m.bias) continue;
      specs.push_back({.name = base + ".bias", .shape = {m.out}, .required = false, .f32_only = true});
    }
    const struct {
      const char* name;
      int64_t width;
      bool present;
    } norms[] = {
        {"attn_norm.weight", h.n_embd, true},
        {"ffn_norm.weight", h.n_embd, true},
        {"attn_q_norm.weight", h.head_dim_k, parts.head_norms},
        {"attn_k_norm.weight", h.head_dim_k, parts.head_norms},
        {"post_attention_norm.weight", h.n_embd, parts.post_norms},
        {"post_ffw_norm.weight", h.n_embd, parts.post_norms},
    };
    for (const auto& n : norms) {
      if (!n.present) continue;
      specs.push_back({.name = layer_name(layer, n.name), .shape = {n.width}, .f32_only = true});
    }
  }
  return specs;
}

// --- graph ----------------------------------------------------------------------------------------------------

ggml_tensor* self_attention(GraphBuilder& b, int64_t layer, ggml_tensor* x, ggml_tensor* factors) {
  const HyperParameters& h = b.h;
  const Rope& rope = h.rope_of(layer);
  ggml_tensor* q = heads(b, b.linear(x, layer_name(layer, "attn_q")), h.head_dim_k);
  ggml_tensor* k = heads(b, b.linear(x, layer_name(layer, "attn_k")), h.head_dim_k);
  ggml_tensor* v = heads(b, b.linear(x, layer_name(layer, "attn_v")), h.head_dim_v);
  if (b.weight(layer_name(layer, "attn_q_norm.weight"))) q = b.rms_norm(q, layer_name(layer, "attn_q_norm"));
  if (b.weight(layer_name(layer, "attn_k_norm.weight"))) k = b.rms_norm(k, layer_name(layer, "attn_k_norm"));
  q = b.rope(q, rope, factors);
  k = b.rope(k, rope, factors);
  ggml_tensor* attended = b.attention.build(b, int(layer), q, k, v);
  return b.linear(attended, layer_name(layer, "attn_output"));
}

ggml_tensor* feed_forward(const GraphBuilder& b, int64_t layer, ggml_tensor* x, ggml_glu_op activation) {
  ggml_tensor* up = b.linear(x, layer_name(layer, "ffn_up"));
  ggml_tensor* gate = b.linear(x, layer_name(layer, "ffn_gate"));
  return b.linear(ggml_glu_split(b.ctx, gate, up, activation), layer_name(layer, "ffn_down"));
}

ggml_tensor* wanted_rows(const GraphBuilder& b, int64_t layer, ggml_tensor* x) {
  return layer == b.h.n_layers - 1 ? ggml_get_rows(b.ctx, x, b.output_rows) : x;
}

ggml_tensor* output_logits(const GraphBuilder& b, ggml_tensor* x) {
  x = b.rms_norm(x, "output_norm");
  ggml_tensor* head = b.weight("output.weight");
  ggml_tensor* logits = b.product(head ? head : b.weight("token_embd.weight"), x);
  ggml_tensor* bias = b.weight("output.bias");
  return bias ? ggml_add(b.ctx, logits, bias) : logits;
}

ggml_tensor* pre_norm_decoder(GraphBuilder& b) {
  ggml_tensor* factors = b.weight("rope_freqs.weight");                            // Llama 3; null for the others
  ggml_tensor* x = ggml_get_rows(b.ctx, b.weight("token_embd.weight"), b.tokens);  // [n_embd, n_tokens]
  for (int64_t layer = 0; layer < b.h.n_layers; ++layer) {
    ggml_tensor* normed = b.rms_norm(x, layer_name(layer, "attn_norm"));
    ggml_tensor* out = wanted_rows(b, layer, self_attention(b, layer, normed, factors));
    x = ggml_add(b.ctx, out, wanted_rows(b, layer, x));
    normed = b.rms_norm(x, layer_name(layer, "ffn_norm"));
    x = ggml_add(b.ctx, feed_forward(b, layer, normed, GGML_GLU_OP_SWIGLU), x);
  }
  return output_logits(b, x);
}

}  // namespace pagedkv::engine
