// libllama on the same file: what the engine's numbers are held against.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

struct llama_model;
struct llama_context;

namespace pagedkv::engine {

struct OracleOptions {
  int context = 512;
  bool flash = false;   // with it, libllama casts f32 K and V to f16
  bool f16_kv = false;  // else f32
  int threads = 1;
};

class Oracle {
 public:
  Oracle(const std::string& path, const OracleOptions& options);
  ~Oracle();
  int64_t vocab_size() const { return vocab_size_; }
  std::vector<int32_t> tokenize(const std::string& text) const;
  // Logits of every token, [tokens, vocab_size], from an empty cache, `chunk` tokens at a time.
  std::vector<float> logits(std::span<const int32_t> tokens, int chunk = 512);
  // The same, chunk after chunk, for vocabularies that do not fit in memory several thousand times.
  void each_chunk(std::span<const int32_t> tokens, int chunk,
                  const std::function<void(std::span<const float>)>& use);

 private:
  std::unique_ptr<llama_model, void (*)(llama_model*)> model_;
  std::unique_ptr<llama_context, void (*)(llama_context*)> context_;
  int64_t vocab_size_ = 0;
};

// Largest |a - b| over any row, divided by the standard deviation of that row of `b`.
//   a, b  [rows, width]
double worst_error(std::span<const float> a, std::span<const float> b, int64_t width);

int64_t argmax(std::span<const float> row);
// Natural logarithm of the probability of `token`.
double log_probability(std::span<const float> row, int32_t token);

}  // namespace pagedkv::engine
