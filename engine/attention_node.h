// Where ggml meets pagedkv: each layer's attention enters the ggml graph as three custom nodes,
//
//   append(k, v) -> attend(q) -> merge
//
// joined by real tensor edges, because ggml orders nodes by edges alone. ggml runs node after node on all its
// threads with a barrier between, which is just what the cache asks for: all parts of append before attend, all of
// attend before merge. Each callback takes share (ith, nth) of the work, with the thread count that the graph
// really has.
#pragma once

#include <ggml.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "pagedkv/cache.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

struct GraphBuilder;

// What the nodes of all graphs work on: set before each run, read by the callbacks of that run. The first thing
// that goes wrong in a callback is kept here, since a callback cannot return it.
class AttentionStep {
 public:
  // All borrowed until finish(). `scratch` serves one layer at a time.
  void begin(Cache& cache, StepPlan& plan, std::span<std::byte> scratch);
  // The first error of the run. Call after the graph has ended.
  Status finish();

 private:
  friend class AttentionNodes;
  void fail(Status status);  // any thread

  Cache* cache_ = nullptr;
  StepPlan* plan_ = nullptr;
  std::span<std::byte> scratch_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> claimed_{false};
  Status first_error_;  // written by whoever claimed it, read after the graph has ended
};

// The attention nodes of one graph, which they must outlive: the graph points into them.
class AttentionNodes {
 public:
  explicit AttentionNodes(AttentionStep& step) : step_(step) {}
  AttentionNodes(const AttentionNodes&) = delete;
  AttentionNodes& operator=(const AttentionNodes&) = delete;

  //   q  [head_dim_k, n_head, n_tokens] f32, contiguous      k, v  [head_dim, n_head_kv, n_tokens] f32
  // Returns [head_dim_v * n_head, n_tokens] f32.
  ggml_tensor* build(GraphBuilder& b, int layer, ggml_tensor* q, ggml_tensor* k, ggml_tensor* v);

 private:
  struct Node {
    AttentionStep* step;
    int layer;
    float scale;
    float softcap;
  };
  static void append(ggml_tensor* dst, int ith, int nth, void* node);
  static void attend(ggml_tensor* dst, int ith, int nth, void* node);
  static void merge(ggml_tensor* dst, int ith, int nth, void* node);
  static AttendArgs args(const Node& node, const ggml_tensor* q, float* out);

  AttentionStep& step_;
  std::vector<std::unique_ptr<Node>> nodes_;  // addresses are in the graph
};

}  // namespace pagedkv::engine
