// Architecture "qwen3": the dense models of Qwen 3. As qwen2, with RMS norms over each head of Q and K instead of
// biases, and heads whose width is independent of the embedding's.
//
// As in libllama, a sliding window in the file is not applied.
#include "engine/decoder_layers.h"

namespace pagedkv::engine {
namespace {

class Qwen3 : public Architecture {
 public:
  std::string_view name() const override { return "qwen3"; }

  Result<HyperParameters> read(const GgufFile& file) const override {
    return read_decoder(file, name(), GGML_ROPE_TYPE_NEOX, Rotated::kWholeHead);
  }

  std::vector<TensorSpec> tensors(const HyperParameters& h) const override {
    return decoder_tensors(h, {.head_norms = true});
  }

  ggml_tensor* build(GraphBuilder& b) const override { return pre_norm_decoder(b); }
};

}  // namespace

const Architecture& qwen3_architecture() {
  static const Qwen3 instance;
  return instance;
}

}  // namespace pagedkv::engine
