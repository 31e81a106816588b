// Parts that the families of decoders are put together from: tensor lists and pieces of graph.
//
// A graph follows the tensors of its file: a bias, a norm of heads or a head of its own is applied where the file
// has it. What a file may have is said by tensors(), and check_tensors refuses the rest.
#pragma once

#include <string>
#include <vector>

#include "engine/architecture.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

// "blk.LAYER.REST"
std::string layer_name(int64_t layer, const char* rest);

// --- reading and checking -------------------------------------------------------------------------------------

// K and V rows must be equally long, and `rotated` says whether all of K's dimensions must be rotated. libllama
// refuses other files of these families, so that there is nothing to compare them with. Errors: kUnsupported.
enum class Rotated : uint8_t { kWholeHead, kAnyPart };
Status check_heads(std::string_view architecture, const HyperParameters& h, Rotated rotated);
// read_common, read_rope and check_heads in one: what every family here starts from.
Result<HyperParameters> read_decoder(const GgufFile& file, std::string_view architecture, int rope_mode,
                                     Rotated rotated);

// What a family's layers have besides the seven matrices and the norms before attention and feed-forward.
struct LayerParts {
  enum class Biases : uint8_t { kOfQkv, kOfEveryMatrix };
  Biases biases = Biases::kOfQkv;  // where the file has them
  bool head_norms = false;         // attn_q_norm, attn_k_norm: RMS over each head, before the rotation
  bool post_norms = false;         // post_attention_norm, post_ffw_norm: before the sum with the residual
};
std::vector<TensorSpec> decoder_tensors(const HyperParameters& h, const LayerParts& parts);

// --- graph ----------------------------------------------------------------------------------------------------

// Norm of heads, rotation, attention through the cache and output projection. `x` is normed, [n_embd, n_tokens];
// `factors` of the rotation may be null. Returns [n_embd, n_tokens].
ggml_tensor* self_attention(GraphBuilder& b, int64_t layer, ggml_tensor* x, ggml_tensor* factors);

// W_down (act(W_gate x) * W_up x)
ggml_tensor* feed_forward(const GraphBuilder& b, int64_t layer, ggml_tensor* x, ggml_glu_op activation);

// Behind the last attention only the rows whose logits are wanted go on.
ggml_tensor* wanted_rows(const GraphBuilder& b, int64_t layer, ggml_tensor* x);

// Last norm and output matrix, which is the embedding where the file has no other. [vocab_size, n_rows]
ggml_tensor* output_logits(const GraphBuilder& b, ggml_tensor* x);

// The whole graph of the families with a norm before attention and feed-forward and a SiLU gate: llama, qwen2,
// qwen3. Uses rope_freqs.weight where the file has it.
ggml_tensor* pre_norm_decoder(GraphBuilder& b);

}  // namespace pagedkv::engine
