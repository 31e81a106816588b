#include "engine/graph.h"

#include <algorithm>
#include <string>
#include <utility>

namespace pagedkv::engine {
namespace {

constexpr size_t kMaxGraphs = 16;       // of a 30-layer model: 0.5 MB each
constexpr int64_t kNodesPerLayer = 48;  // llama with every bias has 32
constexpr int64_t kNodesBesides = 32;

}  // namespace

Result<std::unique_ptr<Graphs>> Graphs::create(const Model& model, AttentionStep& step, const Products& products,
                                               int threads) {
  ggml_cpu_init();
  std::unique_ptr<Graphs> out(new Graphs(model, step, products, threads));
  ggml_threadpool_params params = ggml_threadpool_params_default(threads);
  out->pool_ = ggml_threadpool_new(&params);
  out->allocator_.reset(ggml_gallocr_new(ggml_backend_cpu_buffer_type()));
  if (!out->pool_ || !out->allocator_) {
    return Status(Code::kUnavailable, "ggml could not start " + std::to_string(threads) + " threads");
  }
  return out;
}

Graphs::~Graphs() {
  if (pool_) ggml_threadpool_free(pool_);
}

std::unique_ptr<Graph> Graphs::build(int64_t n_tokens, int64_t n_rows) {
  auto g = std::make_unique<Graph>();
  g->n_tokens = n_tokens;
  g->n_rows = n_rows;
  g->attention = std::make_unique<AttentionNodes>(step_);
  g->products = std::make_unique<ProductNodes>(products_);
  const auto n_nodes = size_t(model_.hyper_parameters().n_layers * kNodesPerLayer + kNodesBesides);
  g->context.reset(
      ggml_init({.mem_size = ggml_tensor_overhead() * n_nodes + ggml_graph_overhead_custom(n_nodes, false),
                 .mem_buffer = nullptr,
                 .no_alloc = true}));
  if (!g->context) return nullptr;
  ggml_context* ctx = g->context.get();
  g->graph = ggml_new_graph_custom(ctx, n_nodes, false);
  g->tokens = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);
  g->positions = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_tokens);
  g->output_rows = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_rows);
  for (ggml_tensor* t : {g->tokens, g->positions, g->output_rows}) ggml_set_input(t);
  GraphBuilder builder{.ctx = ctx,
                       .graph = g->graph,
                       .h = model_.hyper_parameters(),
                       .weights = model_.weights(),
                       .attention = *g->attention,
                       .products = *g->products,
                       .tokens = g->tokens,
                       .positions = g->positions,
                       .output_rows = g->output_rows};
  g->logits = model_.architecture().build(builder);
  ggml_set_output(g->logits);
  ggml_build_forward_expand(g->graph, g->logits);
  return g;
}

Result<Graph*> Graphs::get(int64_t n_tokens, int64_t n_rows) {
  const auto found = std::find_if(graphs_.begin(), graphs_.end(),
                                  [&](const auto& g) { return g->n_tokens == n_tokens && g->n_rows == n_rows; });
  if (found != graphs_.end()) {
    graphs_.splice(graphs_.begin(), graphs_, found);
    return graphs_.front().get();
  }
  std::unique_ptr<Graph> g = build(n_tokens, n_rows);
  if (!g) return Status(Code::kNoMemory, "no memory for a graph of " + std::to_string(n_tokens) + " tokens");
  // All graphs lie in one buffer, since one runs at a time. When it has to grow it moves, and what pointed into the
  // old one goes.
  const size_t before = ggml_gallocr_get_buffer_size(allocator_.get(), 0);
  const bool placed =
      ggml_gallocr_reserve(allocator_.get(), g->graph) && ggml_gallocr_alloc_graph(allocator_.get(), g->graph);
  if (!placed || ggml_gallocr_get_buffer_size(allocator_.get(), 0) != before) graphs_.clear();
  if (!placed) {
    return Status(Code::kNoMemory, "no memory for the activations of " + std::to_string(n_tokens) + " tokens and " +
                                       std::to_string(n_rows) + " rows of logits");
  }
  g->plan = ggml_graph_plan(g->graph, threads_, pool_);
  if (g->plan.work_size > work_.size()) work_.resize(g->plan.work_size);
  graphs_.push_front(std::move(g));
  if (graphs_.size() > kMaxGraphs) graphs_.pop_back();
  return graphs_.front().get();
}

Status Graphs::compute(Graph& graph) {
  graph.plan.work_data = reinterpret_cast<uint8_t*>(work_.data());
  const ggml_status status = ggml_graph_compute(graph.graph, &graph.plan);
  if (status == GGML_STATUS_SUCCESS) return Status();
  return Status(Code::kInternal, std::string("ggml: ") + ggml_status_to_string(status));
}

}  // namespace pagedkv::engine
