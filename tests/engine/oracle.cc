#include "tests/engine/oracle.h"

#include <llama.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace pagedkv::engine {

Oracle::Oracle(const std::string& path, const OracleOptions& options)
    : model_(nullptr, llama_model_free), context_(nullptr, llama_free) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  auto model_params = llama_model_default_params();
  model_params.n_gpu_layers = 0;
  model_params.use_extra_bufts = false;  // weights as they are in the file, so that both run the same products
  model_.reset(llama_model_load_from_file(path.c_str(), model_params));
  if (!model_) throw std::runtime_error("libllama does not load " + path);
  auto params = llama_context_default_params();
  params.n_ctx = uint32_t(options.context);
  params.n_batch = params.n_ubatch = uint32_t(std::min(options.context, 512));
  params.n_threads = params.n_threads_batch = options.threads;
  params.type_k = params.type_v = options.f16_kv ? GGML_TYPE_F16 : GGML_TYPE_F32;
  params.flash_attn_type = options.flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  context_.reset(llama_init_from_model(model_.get(), params));
  if (!context_) throw std::runtime_error("libllama makes no context for " + path);
  vocab_size_ = llama_vocab_n_tokens(llama_model_get_vocab(model_.get()));
}

Oracle::~Oracle() = default;

std::vector<int32_t> Oracle::tokenize(const std::string& text) const {
  std::vector<int32_t> tokens(text.size() + 8);
  const int n = llama_tokenize(llama_model_get_vocab(model_.get()), text.data(), int32_t(text.size()),
                               tokens.data(), int32_t(tokens.size()), true, false);
  tokens.resize(size_t(std::max(n, 0)));
  return tokens;
}

std::vector<float> Oracle::logits(std::span<const int32_t> tokens, int chunk) {
  std::vector<float> out;
  out.reserve(tokens.size() * size_t(vocab_size_));
  each_chunk(tokens, chunk, [&](std::span<const float> rows) { out.insert(out.end(), rows.begin(), rows.end()); });
  return out;
}

void Oracle::each_chunk(std::span<const int32_t> tokens, int chunk,
                        const std::function<void(std::span<const float>)>& use) {
  llama_memory_clear(llama_get_memory(context_.get()), true);
  for (size_t at = 0; at < tokens.size();) {
    const auto n = int(std::min(tokens.size() - at, size_t(chunk)));
    llama_batch batch = llama_batch_init(n, 0, 1);
    batch.n_tokens = n;
    for (int i = 0; i < n; ++i) {
      batch.token[i] = tokens[at + size_t(i)];
      batch.pos[i] = static_cast<llama_pos>(at) + i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = 1;
    }
    const int status = llama_decode(context_.get(), batch);
    llama_batch_free(batch);
    if (status != 0) throw std::runtime_error("llama_decode failed");
    use({llama_get_logits(context_.get()), size_t(n * vocab_size_)});
    at += size_t(n);
  }
}

double worst_error(std::span<const float> a, std::span<const float> b, int64_t width) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0;
  for (size_t row = 0; row < b.size(); row += size_t(width)) {
    double sum = 0, squares = 0, error = 0;
    for (size_t i = row; i < row + size_t(width); ++i) {
      sum += b[i];
      squares += double(b[i]) * b[i];
      const double difference = std::fabs(double(a[i]) - b[i]);
      if (!(difference <= error)) error = difference;  // NaN stays
    }
    const double mean = sum / double(width);
    const double deviation = std::sqrt(squares / double(width) - mean * mean);
    if (!(error / deviation <= worst)) worst = error / deviation;
  }
  return worst;
}

int64_t argmax(std::span<const float> row) { return std::max_element(row.begin(), row.end()) - row.begin(); }

double log_probability(std::span<const float> row, int32_t token) {
  const float most = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (float x : row) sum += std::exp(double(x) - most);
  return double(row[size_t(token)]) - most - std::log(sum);
}

}  // namespace pagedkv::engine
