// Computation graphs, built once for each shape of step and kept.
//
// Attention is opaque to ggml, so a graph depends on nothing but the number of new tokens and of wanted logit rows:
// never on sequences, lengths or blocks.
#pragma once

#include <ggml-alloc.h>
#include <ggml-cpp.h>
#include <ggml-cpu.h>

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "engine/attention_node.h"
#include "engine/model.h"
#include "engine/product_node.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

struct Graph {
  int64_t n_tokens = 0;
  int64_t n_rows = 0;
  std::unique_ptr<AttentionNodes> attention;  // the graph points into it
  std::unique_ptr<ProductNodes> products;     // and into these
  ggml_context_ptr context;
  ggml_cgraph* graph = nullptr;
  ggml_tensor* tokens = nullptr;       // [n_tokens] i32
  ggml_tensor* positions = nullptr;    // [n_tokens] i32
  ggml_tensor* output_rows = nullptr;  // [n_rows] i32
  ggml_tensor* logits = nullptr;       // [vocab_size, n_rows] f32
  ggml_cplan plan = {};
};

// One thread; the workers of ggml's pool live in here and sleep between steps.
class Graphs {
 public:
  // All three must outlive it; `products` is for as many threads. Errors: kUnavailable (threads), kNoMemory.
  static Result<std::unique_ptr<Graphs>> create(const Model& model, AttentionStep& step, const Products& products,
                                                int threads);
  ~Graphs();

  // A graph with memory behind its tensors. Valid until the next get(): all graphs share one compute buffer.
  // Errors: kNoMemory.
  Result<Graph*> get(int64_t n_tokens, int64_t n_rows);
  // Runs it. The inputs' data must have been written.
  Status compute(Graph& graph);
  int threads() const { return threads_; }

 private:
  Graphs(const Model& model, AttentionStep& step, const Products& products, int threads)
      : model_(model), step_(step), products_(products), threads_(threads) {}
  std::unique_ptr<Graph> build(int64_t n_tokens, int64_t n_rows);

  const Model& model_;
  AttentionStep& step_;
  const Products& products_;
  const int threads_;
  ggml_threadpool* pool_ = nullptr;
  ggml_gallocr_ptr allocator_;
  std::vector<std::byte> work_;               // ggml's scratch, as large as the largest plan so far
  std::list<std::unique_ptr<Graph>> graphs_;  // most recently used first
};

}  // namespace pagedkv::engine
