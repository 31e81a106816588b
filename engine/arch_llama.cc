// Architecture "llama": Llama 1 to 3, Mistral 7B, SmolLM2 and other models with the same graph.
//
// As in libllama, a sliding window in the file is not applied: Mistral 7B v0.1, the one such model, was trained
// with it, and every GGUF engine runs it with full attention.
#include "engine/decoder_layers.h"

namespace pagedkv::engine {
namespace {

class Llama : public Architecture {
 public:
  std::string_view name() const override { return "llama"; }

  Result<HyperParameters> read(const GgufFile& file) const override {
    return read_decoder(file, name(), GGML_ROPE_TYPE_NORMAL, Rotated::kWholeHead);
  }

  std::vector<TensorSpec> tensors(const HyperParameters& h) const override {
    auto specs = decoder_tensors(h, {.biases = LayerParts::Biases::kOfEveryMatrix});
    specs.push_back(
        {.name = "rope_freqs.weight", .shape = {h.rope.n_dims / 2}, .required = false, .f32_only = true});
    return specs;
  }

  ggml_tensor* build(GraphBuilder& b) const override { return pre_norm_decoder(b); }
};

}  // namespace

const Architecture& llama_architecture() {
  static const Llama instance;
  return instance;
}

}  // namespace pagedkv::engine
