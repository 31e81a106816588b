// Architecture "gemma3": the text part of Gemma 3.
//
// Most layers see a sliding window and rotate with a base of their own; every sixth, unless the file says
// otherwise, sees all. RMS norms stand before and after attention and feed-forward and over each head of Q and K.
// The file's norm weights carry the 1 that Gemma adds to them.
#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/decoder_layers.h"

namespace pagedkv::engine {
namespace {

constexpr int64_t kPattern = 6;                   // of n layers in a row, the last sees all
constexpr float kWindowFreqBase = 10000;          // where the file does not say
constexpr int64_t kLayersOf27B = 62;              // whose scale is not that of its heads
constexpr int64_t kMaxWindow = int64_t{1} << 30;  // positions are int32

Status corrupt(std::string message) { return Status(Code::kCorrupt, std::move(message)); }

class Gemma3 : public Architecture {
 public:
  std::string_view name() const override { return "gemma3"; }

  Result<HyperParameters> read(const GgufFile& file) const override {
    auto h = read_decoder(file, name(), GGML_ROPE_TYPE_NEOX, Rotated::kAnyPart);
    if (!h.ok()) return h;
    if (Status s = read_windows(file, *h); !s.ok()) return s;

    auto final_cap = read_softcap(file, "gemma3.final_logit_softcapping");
    if (!final_cap.ok()) return final_cap.status();
    h->final_softcap = *final_cap;
    // libllama does not read this one: no released model sets it.
    auto cap = read_softcap(file, "gemma3.attn_logit_softcapping");
    if (!cap.ok()) return cap.status();
    h->softcap = *cap;
    // Google's config gives 168 for the largest model's heads of 128; it is told by its layers, as in libllama.
    if (h->n_layers == kLayersOf27B) {
      const auto width = float(std::max<int64_t>(h->n_embd / h->n_head, 1));
      h->attention_scale = 1.0f / std::sqrt(width);
    }
    return h;
  }

  std::vector<TensorSpec> tensors(const HyperParameters& h) const override {
    return decoder_tensors(h, {.head_norms = true, .post_norms = true});
  }

  ggml_tensor* build(GraphBuilder& b) const override {
    const HyperParameters& h = b.h;
    ggml_tensor* x = ggml_get_rows(b.ctx, b.weight("token_embd.weight"), b.tokens);  // [n_embd, n_tokens]
    x = ggml_scale(b.ctx, x, std::sqrt(float(h.n_embd)));
    for (int64_t layer = 0; layer < h.n_layers; ++layer) {
      ggml_tensor* normed = b.rms_norm(x, layer_name(layer, "attn_norm"));
      ggml_tensor* out = wanted_rows(b, layer, self_attention(b, layer, normed, nullptr));
      out = b.rms_norm(out, layer_name(layer, "post_attention_norm"));
      x = ggml_add(b.ctx, out, wanted_rows(b, layer, x));
      normed = b.rms_norm(x, layer_name(layer, "ffn_norm"));
      out = feed_forward(b, layer, normed, GGML_GLU_OP_GEGLU);
      out = b.rms_norm(out, layer_name(layer, "post_ffw_norm"));
      x = ggml_add(b.ctx, out, x);
    }
    ggml_tensor* logits = output_logits(b, x);
    if (h.final_softcap == 0) return logits;
    logits = ggml_tanh(b.ctx, ggml_scale(b.ctx, logits, 1.0f / h.final_softcap));
    return ggml_scale(b.ctx, logits, h.final_softcap);
  }

 private:
  // Missing or 0: off.
  static Result<float> read_softcap(const GgufFile& file, const std::string& key) {
    auto value = file.real(key);
    if (!value.ok()) return value.status();
    const double cap = value->value_or(0);
    if (cap != 0 && !(cap >= 1e-3 && cap <= 1e9)) {
      return corrupt("key '" + key + "' is " + std::to_string(cap) + ", expected 0 (off) or 0.001 to 1e9");
    }
    return float(cap);
  }

  // Window, pattern of the layers that have it, and their rotation. Without a window all layers are alike.
  Status read_windows(const GgufFile& file, HyperParameters& h) const {
    h.rope_windowed = h.rope;
    for (const char* key : {"attention.key_length_swa", "attention.value_length_swa"}) {
      auto length = read_integer(file, name(), {.name = key, .most = kMaxWindow, .otherwise = h.head_dim_k});
      if (!length.ok()) return length.status();
      if (*length != h.head_dim_k) {
        return Status(Code::kUnsupported, "key 'gemma3." + std::string(key) + "' is " + std::to_string(*length) +
                                              "; only the heads' width of the other layers, " +
                                              std::to_string(h.head_dim_k) + ", is supported");
      }
    }
    auto window = read_integer(
        file, name(), {.name = "attention.sliding_window", .least = 0, .most = kMaxWindow, .otherwise = 0});
    if (!window.ok()) return window.status();
    if (*window == 0) return Status();

    auto base = read_positive(file, "gemma3.rope.freq_base_swa", kWindowFreqBase);
    if (!base.ok()) return base.status();
    h.rope_windowed.freq_base = *base;
    h.rope_windowed.freq_scale = 1;  // long contexts stretch the others alone

    const std::string key = "gemma3.attention.sliding_window_pattern";
    auto listed = file.flags(key);
    if (!listed.ok()) return listed.status();
    if (listed->has_value()) {
      if (std::ssize(**listed) != h.n_layers) {
        return corrupt("key '" + key + "' has " + std::to_string((*listed)->size()) + " elements, expected " +
                       std::to_string(h.n_layers) + ", one for each layer");
      }
      for (size_t layer = 0; layer < h.windows.size(); ++layer) {
        if ((**listed)[layer]) h.windows[layer] = *window;
      }
      return Status();
    }
    auto pattern = read_integer(
        file, name(),
        {.name = "attention.sliding_window_pattern", .least = 0, .most = kMaxWindow, .otherwise = kPattern});
    if (!pattern.ok()) return pattern.status();
    for (int64_t layer = 0; layer < h.n_layers; ++layer) {
      const bool full = *pattern != 0 && layer % *pattern == *pattern - 1;  // 0: none does
      if (!full) h.windows[size_t(layer)] = *window;
    }
    return Status();
  }
};

}  // namespace

const Architecture& gemma3_architecture() {
  static const Gemma3 instance;
  return instance;
}

}  // namespace pagedkv::engine
