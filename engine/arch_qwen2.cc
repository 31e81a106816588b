// Architecture "qwen2": Qwen 1.5, Qwen 2 and 2.5. As llama, with biases of Q, K and V, and rotation by halves.
//
// As in libllama, a sliding window in the file is not applied.
#include "engine/decoder_layers.h"

namespace pagedkv::engine {
namespace {

class Qwen2 : public Architecture {
 public:
  std::string_view name() const override { return "qwen2"; }

  Result<HyperParameters> read(const GgufFile& file) const override {
    return read_decoder(file, name(), GGML_ROPE_TYPE_NEOX, Rotated::kWholeHead);
  }

  std::vector<TensorSpec> tensors(const HyperParameters& h) const override {
    auto specs = decoder_tensors(h, {});
    specs.push_back({.name = "output.bias", .shape = {h.vocab_size}, .required = false, .f32_only = true});
    return specs;
  }

  ggml_tensor* build(GraphBuilder& b) const override { return pre_norm_decoder(b); }
};

}  // namespace

const Architecture& qwen2_architecture() {
  static const Qwen2 instance;
  return instance;
}

}  // namespace pagedkv::engine
