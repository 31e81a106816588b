// ggml_flash_attn_ext over contiguous K and V.

#include <ggml-cpu.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "bench/peer.h"

namespace pagedkv::bench {
namespace {

constexpr size_t kGraphNodes = 16;  // a graph holds one node and its inputs

struct Attention {
  ggml_context* context = nullptr;
  std::vector<ggml_cgraph*> graphs;  // one a copy
  ggml_threadpool* pool = nullptr;
  std::vector<uint8_t> work;
  std::vector<ggml_cplan> plans;
  size_t next = 0;

  ~Attention() {
    ggml_threadpool_free(pool);
    ggml_free(context);
  }
};

ggml_type type_of(Format format) {
  switch (format) {
    case Format::kF32:
      return GGML_TYPE_F32;
    case Format::kF16:
      return GGML_TYPE_F16;
    case Format::kBF16:
      return GGML_TYPE_BF16;
    case Format::kQ8:
      return GGML_TYPE_Q8_0;
    case Format::kQ4:
      return GGML_TYPE_Q4_0;
    default:
      return GGML_TYPE_COUNT;
  }
}

void fill(ggml_tensor* tensor, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> pool(size_t(tensor->ne[0]) * 64);
  for (float& x : pool) x = normal(random);
  const int64_t rows = ggml_nrows(tensor);
  for (int64_t row = 0; row < rows; ++row) {
    void* to = static_cast<char*>(tensor->data) + size_t(row) * ggml_row_size(tensor->type, tensor->ne[0]);
    ggml_quantize_chunk(tensor->type, pool.data() + size_t(row % 64) * size_t(tensor->ne[0]), to, 0, 1,
                        tensor->ne[0], nullptr);
  }
}

}  // namespace

std::function<void(int64_t)> ggml_attention(const AttentionShape& s, Format format, int threads) {
  const ggml_type type = type_of(format);
  if (type == GGML_TYPE_COUNT || s.head_dim % ggml_blck_size(type) != 0) return {};
  auto a = std::make_shared<Attention>();
  const size_t kv_bytes = ggml_row_size(type, s.head_dim) * size_t(s.tokens * s.heads_kv * s.batch);
  const size_t overhead = 8 * ggml_tensor_overhead() + ggml_graph_overhead_custom(kGraphNodes, false) + 1024;
  const size_t bytes =
      (2 * kv_bytes + size_t(s.rows * s.heads_q * s.head_dim * s.batch) * 8 + overhead) * size_t(s.copies) +
      size_t(s.tokens) * size_t(s.rows + 64) * 2 + (size_t{64} << 20);
  a->context = ggml_init({bytes, nullptr, false});
  ggml_tensor* mask = nullptr;
  if (s.rows > 1) {
    mask = ggml_new_tensor_2d(a->context, GGML_TYPE_F16, s.tokens, (s.rows + 63) / 64 * 64);
    auto* at = static_cast<ggml_fp16_t*>(mask->data);
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    for (int64_t row = 0; row < mask->ne[1]; ++row)
      for (int64_t t = 0; t < s.tokens; ++t) *at++ = t <= s.tokens - s.rows + row ? seen : hidden;
  }
  for (int64_t copy = 0; copy < s.copies; ++copy) {
    ggml_tensor* q = ggml_new_tensor_4d(a->context, GGML_TYPE_F32, s.head_dim, s.rows, s.heads_q, s.batch);
    ggml_tensor* k = ggml_new_tensor_4d(a->context, type, s.head_dim, s.tokens, s.heads_kv, s.batch);
    ggml_tensor* v = ggml_new_tensor_4d(a->context, type, s.head_dim, s.tokens, s.heads_kv, s.batch);
    fill(q, 1);
    fill(k, uint32_t(copy) + 2);
    fill(v, uint32_t(copy) + 3);
    ggml_tensor* out = ggml_flash_attn_ext(a->context, q, k, v, mask, 1.0f / std::sqrt(float(s.head_dim)), 0, 0);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    a->graphs.push_back(ggml_new_graph_custom(a->context, kGraphNodes, false));
    ggml_build_forward_expand(a->graphs.back(), out);
  }
  ggml_threadpool_params params = ggml_threadpool_params_default(threads);
  a->pool = ggml_threadpool_new(&params);
  for (ggml_cgraph* graph : a->graphs) {
    a->plans.push_back(ggml_graph_plan(graph, threads, a->pool));
    a->work.resize(std::max(a->work.size(), a->plans.back().work_size));
  }
  for (ggml_cplan& plan : a->plans) plan.work_data = a->work.data();
  ggml_threadpool_pause(a->pool);
  // Between calls the pool polls, as in ggml's own programs; after its turn it must not take a core from us.
  return [a](int64_t calls) {
    for (int64_t call = 0; call < calls; ++call) {
      ggml_graph_compute(a->graphs[a->next], &a->plans[a->next]);
      a->next = (a->next + 1) % a->graphs.size();
    }
    ggml_threadpool_pause(a->pool);
  };
}

struct GgmlProduct::Impl {
  ggml_context* context = nullptr;
  ggml_threadpool* pool = nullptr;
  ggml_cgraph* graph = nullptr;
  ggml_cplan plan = {};
  ggml_tensor* weight = nullptr;
  std::vector<std::byte> weights;
  std::vector<float> y;
  std::vector<uint8_t> work;
  int64_t copies = 1, next = 0;

  ~Impl() {
    ggml_threadpool_free(pool);
    ggml_free(context);
  }
};

GgmlProduct::GgmlProduct(const ProductShape& s, std::span<const float> x, int threads)
    : impl_(std::make_unique<Impl>()) {
  ggml_type type = GGML_TYPE_COUNT;
  for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
    std::string name = ggml_type_name(ggml_type(i));
    for (char& c : name) c = c >= 'a' && c <= 'z' ? char(c - 'a' + 'A') : c;
    if (name == s.type) type = ggml_type(i);
  }
  Impl& m = *impl_;
  m.copies = s.copies;
  m.context = ggml_init({.mem_size = size_t{1} << 20, .mem_buffer = nullptr, .no_alloc = true});
  m.weight = ggml_new_tensor_2d(m.context, type, s.n_in, s.n_out);
  const size_t bytes = ggml_nbytes(m.weight);
  m.weights.resize(bytes * size_t(s.copies));
  m.weight->data = m.weights.data();
  fill(m.weight, 1);
  for (int64_t copy = 1; copy < s.copies; ++copy)
    std::copy_n(m.weights.begin(), bytes, m.weights.begin() + int64_t(bytes) * copy);
  ggml_tensor* input = ggml_new_tensor_2d(m.context, GGML_TYPE_F32, s.n_in, s.n_tokens);
  input->data = const_cast<float*>(x.data());
  ggml_tensor* out = ggml_mul_mat(m.context, m.weight, input);
  m.y.resize(size_t(s.n_out * s.n_tokens));
  out->data = m.y.data();
  m.graph = ggml_new_graph_custom(m.context, kGraphNodes, false);
  ggml_build_forward_expand(m.graph, out);
  ggml_threadpool_params params = ggml_threadpool_params_default(threads);
  m.pool = ggml_threadpool_new(&params);
  m.plan = ggml_graph_plan(m.graph, threads, m.pool);
  m.work.resize(m.plan.work_size + 64);
  m.plan.work_data = m.work.data();
}
GgmlProduct::~GgmlProduct() = default;

std::span<const std::byte> GgmlProduct::weights() const { return impl_->weights; }
std::span<const float> GgmlProduct::result() const { return impl_->y; }
void GgmlProduct::run(int64_t calls) {
  Impl& m = *impl_;
  for (int64_t call = 0; call < calls; ++call) {
    m.weight->data = m.weights.data() + int64_t(ggml_nbytes(m.weight)) * (m.next++ % m.copies);
    ggml_graph_compute(m.graph, &m.plan);
  }
}
void GgmlProduct::sleep() { ggml_threadpool_pause(impl_->pool); }

}  // namespace pagedkv::bench
