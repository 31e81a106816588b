#include "engine/attention_node.h"

#include <utility>

#include "engine/architecture.h"

namespace pagedkv::engine {
namespace {

// Rows of a tensor [dim, heads, n_tokens] f32. ggml's strides are in bytes, ours in elements.
KvRows rows_of(const ggml_tensor* t) {
  return {.data = t->data,
          .type = ElementType::kF32,
          .token_stride = int64_t(t->nb[2] / sizeof(float)),
          .head_stride = int64_t(t->nb[1] / sizeof(float))};
}

}  // namespace

void AttentionStep::begin(Cache& cache, StepPlan& plan, std::span<std::byte> scratch) {
  cache_ = &cache;
  plan_ = &plan;
  scratch_ = scratch;
  first_error_ = Status();
  claimed_.store(false);
  failed_.store(false);
}

Status AttentionStep::finish() {
  cache_ = nullptr;
  plan_ = nullptr;
  scratch_ = {};
  return std::exchange(first_error_, Status());
}

void AttentionStep::fail(Status status) {
  if (!claimed_.exchange(true)) first_error_ = std::move(status);
  failed_.store(true);
}

ggml_tensor* AttentionNodes::build(GraphBuilder& b, int layer, ggml_tensor* q, ggml_tensor* k, ggml_tensor* v) {
  nodes_.push_back(std::make_unique<Node>(
      Node{.step = &step_, .layer = layer, .scale = b.h.attention_scale, .softcap = b.h.softcap}));
  Node* node = nodes_.back().get();
  // Expanded in libllama's order, so that ggml runs the same products after one another.
  for (ggml_tensor* t : {q, v, k}) ggml_build_forward_expand(b.graph, t);
  // append's result is empty of meaning: an edge for attend to depend on.
  ggml_tensor* kv[] = {k, v};
  ggml_tensor* appended = ggml_custom_4d(b.ctx, GGML_TYPE_F32, 1, 1, 1, 1, kv, 2, append, GGML_N_TASKS_MAX, node);
  ggml_tensor* inputs[] = {q, appended};
  ggml_tensor* attended = ggml_custom_4d(b.ctx, GGML_TYPE_F32, v->ne[0] * q->ne[1], q->ne[2], 1, 1, inputs, 2,
                                         attend, GGML_N_TASKS_MAX, node);
  // merge works on attend's memory, as a view. q is named again so that its memory is not reused before.
  ggml_tensor* again[] = {q};
  return ggml_custom_inplace(b.ctx, attended, again, 1, merge, GGML_N_TASKS_MAX, node);
}

AttendArgs AttentionNodes::args(const Node& node, const ggml_tensor* q, float* out) {
  return {.plan = *node.step->plan_,
          .layer = node.layer,
          .num_q_heads = q->ne[1],
          .q = static_cast<const float*>(q->data),
          .q_token_stride = int64_t(q->nb[2] / sizeof(float)),
          .out = out,
          .scale = node.scale,
          .softcap = node.softcap,
          .scratch = node.step->scratch_};
}

void AttentionNodes::append(ggml_tensor* dst, int ith, int nth, void* userdata) {
  const auto& node = *static_cast<const Node*>(userdata);
  AttentionStep& step = *node.step;
  if (step.failed_.load(std::memory_order_relaxed)) return;
  Status s = step.cache_->append(*step.plan_, node.layer, rows_of(dst->src[0]), rows_of(dst->src[1]), {ith, nth});
  if (!s.ok()) step.fail(std::move(s));
}

void AttentionNodes::attend(ggml_tensor* dst, int ith, int nth, void* userdata) {
  const auto& node = *static_cast<const Node*>(userdata);
  AttentionStep& step = *node.step;
  if (step.failed_.load(std::memory_order_relaxed)) return;
  Status s = step.cache_->attend(args(node, dst->src[0], static_cast<float*>(dst->data)), {ith, nth});
  if (!s.ok()) step.fail(std::move(s));
}

void AttentionNodes::merge(ggml_tensor* dst, int ith, int nth, void* userdata) {
  const auto& node = *static_cast<const Node*>(userdata);
  AttentionStep& step = *node.step;
  if (step.failed_.load(std::memory_order_relaxed)) return;
  // src[0] is attend's result, whose memory dst shares; src[1] is q.
  Status s = step.cache_->merge(args(node, dst->src[1], static_cast<float*>(dst->data)), {ith, nth});
  if (!s.ok()) step.fail(std::move(s));
}

}  // namespace pagedkv::engine
