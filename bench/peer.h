// Peers that a measurement runs beside ours, in turn. Their libraries stay inside peer_*.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pagedkv/format.h"
#include "pagedkv/status.h"

namespace pagedkv::bench {

// ggml's flash attention over contiguous K and V of the same tokens.
struct AttentionShape {
  int64_t heads_q, heads_kv, head_dim;
  int64_t batch;   // sequences
  int64_t tokens;  // stored, per sequence
  int64_t rows;    // query rows per sequence, the last ones
  int64_t copies;  // of K and V, used in turn, so that none is in a cache
};
// Runs so many calls, each over the next copy, and puts its threads to sleep; null when ggml has no such format
// (q6).
std::function<void(int64_t calls)> ggml_attention(const AttentionShape& shape, Format format, int threads);

// ggml_mul_mat with a random weight of a quantized type, by ggml's name of it ("Q4_1").
struct ProductShape {
  std::string type;
  int64_t n_out, n_in, n_tokens;
  int64_t copies;  // of the weight, used in turn
};
class GgmlProduct {
 public:
  // x: [n_tokens, n_in], borrowed.
  GgmlProduct(const ProductShape& shape, std::span<const float> x, int threads);
  ~GgmlProduct();
  std::span<const std::byte> weights() const;  // [copies] of n_out rows
  std::span<const float> result() const;       // [n_tokens, n_out] of the last run
  void run(int64_t calls);                     // each with the next copy
  void sleep();                                // its threads, until the next run

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// libllama on the same file, with its own cache in the format of the same width.
class LlamaPeer {
 public:
  // Null when libllama has no such cache format (q6). Errors: kCorrupt, kInvalidArgument.
  // context: of each sequence.
  static Result<std::unique_ptr<LlamaPeer>> load(const std::string& model, Format format, int64_t context,
                                                 int threads, int64_t sequences = 1);
  virtual ~LlamaPeer() = default;
  virtual void clear() = 0;
  // Feeds tokens of one sequence and waits for the logits of the last one. False on failure.
  virtual bool feed(std::span<const int32_t> tokens) = 0;
  virtual void truncate(int64_t length) = 0;
  // Computes all prompts, one sequence each, and then so many tokens of every answer, all sequences in each step;
  // greedy. False on failure.
  virtual bool answer(std::span<const std::vector<int32_t>> prompts, int64_t n_tokens) = 0;
};

}  // namespace pagedkv::bench
