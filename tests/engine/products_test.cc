// Our matrix products inside the engine: their error beside ggml's, whose they are, and what they promise.
#include <ggml-cpp.h>
#include <ggml-cpu.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "engine/product_node.h"
#include "tests/engine/files.h"
#include "tests/engine/world.h"
#include "tests/products/world.h"

namespace pagedkv::engine {
namespace {

struct Errors {
  double ours = 0, ggmls = 0;  // relative RMS against double
};

// In the order of weight_formats().
constexpr ggml_type kTypes[] = {GGML_TYPE_Q4_0, GGML_TYPE_Q4_1,   GGML_TYPE_Q5_0,  GGML_TYPE_Q5_1,
                                GGML_TYPE_Q8_0, GGML_TYPE_IQ4_NL, GGML_TYPE_Q3_K,  GGML_TYPE_Q4_K,
                                GGML_TYPE_Q5_K, GGML_TYPE_Q6_K,   GGML_TYPE_IQ4_XS};

// y = W x by ggml, on one thread.
std::vector<float> by_ggml(ggml_type type, const std::vector<uint8_t>& w, const std::vector<float>& x,
                           int64_t n_out, int64_t n_in) {
  const ggml_context_ptr context(ggml_init({.mem_size = 16 << 20, .mem_buffer = nullptr, .no_alloc = true}));
  const int64_t n_tokens = int64_t(x.size()) / n_in;
  std::vector<float> y(size_t(n_out * n_tokens));
  ggml_tensor* a = ggml_new_tensor_2d(context.get(), type, n_in, n_out);
  ggml_tensor* b = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, n_in, n_tokens);
  a->data = const_cast<uint8_t*>(w.data());
  b->data = const_cast<float*>(x.data());
  ggml_tensor* c = ggml_mul_mat(context.get(), a, b);
  c->data = y.data();
  ggml_cgraph* graph = ggml_new_graph(context.get());
  ggml_build_forward_expand(graph, c);
  ggml_cplan plan = ggml_graph_plan(graph, 1, nullptr);
  std::vector<uint8_t> work(plan.work_size + 64);
  plan.work_data = work.data();
  EXPECT_EQ(ggml_graph_compute(graph, &plan), GGML_STATUS_SUCCESS);
  return y;
}

Errors errors_of(WeightFormat format, ggml_type type, const MatrixProducts& products, int64_t n_tokens) {
  constexpr int64_t kOut = 96, kIn = 1024;
  const std::vector<float> weights = random_vectors(kOut * kIn, 5), x = random_vectors(n_tokens * kIn, 6);
  const size_t row_bytes = ggml_row_size(type, kIn);
  std::vector<uint8_t> w(size_t(kOut) * row_bytes);
  ggml_quantize_chunk(type, weights.data(), w.data(), 0, kOut, kIn, nullptr);
  std::vector<float> exact(size_t(kOut * kIn));
  ggml_get_type_traits(type)->to_float(w.data(), exact.data(), kOut * kIn);

  const WeightMatrix matrix{.data = reinterpret_cast<const std::byte*>(w.data()),
                            .format = format,
                            .n_out = kOut,
                            .n_in = kIn,
                            .row_bytes = int64_t(row_bytes)};
  const std::vector<float> ours = multiplied(products, matrix, x), ggmls = by_ggml(type, w, x, kOut, kIn);
  double ours2 = 0, ggmls2 = 0, all2 = 0;
  for (int64_t t = 0; t < n_tokens; ++t)
    for (int64_t o = 0; o < kOut; ++o) {
      double y = 0;
      for (int64_t i = 0; i < kIn; ++i) y += double(exact[size_t(o * kIn + i)]) * double(x[size_t(t * kIn + i)]);
      const auto at = size_t(t * kOut + o);
      ours2 += std::pow(ours[at] - y, 2);
      ggmls2 += std::pow(ggmls[at] - y, 2);
      all2 += y * y;
    }
  return {.ours = std::sqrt(ours2 / all2), .ggmls = std::sqrt(ggmls2 / all2)};
}

TEST(EngineProducts, ErrorAgainstDoubleIsNoMoreThanGgmls) {
  ggml_cpu_init();
  for (size_t i = 0; i < std::size(kTypes); ++i)
    for (const int64_t n_tokens : {1, 24})
      for (const char* isa : {"scalar", ""}) {
        const auto products = MatrixProducts::create(isa);
        ASSERT_TRUE(products.ok());
        const Errors e = errors_of(weight_formats()[i], kTypes[i], *products, n_tokens);
        EXPECT_LE(e.ours, 1.05 * e.ggmls) << ggml_type_name(kTypes[i]) << " " << n_tokens;
        EXPECT_LE(e.ours, 0.01) << ggml_type_name(kTypes[i]) << " " << n_tokens;
        if (*isa == '\0')
          std::printf("%s %d tokens: %.2e, ggml %.2e\n", ggml_type_name(kTypes[i]), int(n_tokens), e.ours, e.ggmls);
      }
}

// Of narrow vectors the codes take four times the elements: what a thread keeps them in is counted in bytes.
TEST(EngineProducts, ManyNarrowVectorsStayInWhatAThreadHasForThem) {
  constexpr int64_t kOut = 64;
  constexpr int kThreads = 2;
  ggml_cpu_init();
  for (const auto& [n_in, n_tokens] : {std::pair{32, 256}, {32, 255}, {64, 128}, {96, 85}, {576, 8}, {32, 600}}) {
    const auto products = Products::create(ProductsChoice::kAuto, kThreads);
    ASSERT_TRUE(products.ok());
    ProductNodes nodes(**products);
    const RandomWeight weight(WeightFormat::kQ80, kOut, n_in);
    const std::vector<float> x = random_vectors(int64_t(n_in) * n_tokens);
    std::vector<float> y(size_t(kOut * n_tokens));
    const ggml_context_ptr context(ggml_init({.mem_size = 1 << 20, .mem_buffer = nullptr, .no_alloc = true}));
    ggml_tensor* a = ggml_new_tensor_2d(context.get(), GGML_TYPE_Q8_0, n_in, kOut);
    ggml_tensor* b = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, n_in, n_tokens);
    a->data = const_cast<std::byte*>(weight.bytes.data());
    b->data = const_cast<float*>(x.data());
    ggml_tensor* c = nodes.build(context.get(), a, b);
    c->data = y.data();
    std::vector<std::byte> codes;
    if (c->op == GGML_OP_CUSTOM && c->src[0] != b) {
      codes.resize(ggml_nbytes(c->src[0]));
      c->src[0]->data = codes.data();
    }
    ggml_cgraph* graph = ggml_new_graph(context.get());
    ggml_build_forward_expand(graph, c);
    ggml_cplan plan = ggml_graph_plan(graph, kThreads, nullptr);
    std::vector<uint8_t> work(plan.work_size + 64);
    plan.work_data = work.data();
    ASSERT_EQ(ggml_graph_compute(graph, &plan), GGML_STATUS_SUCCESS);
    if (!(*products)->takes(*a)) continue;  // ggml's on this CPU
    EXPECT_TRUE(same_bits(y, multiplied(*MatrixProducts::create(), weight.matrix(), x))) << n_in << " " << n_tokens;
  }
}

// What a model of SmolLM2's types is to expect of this machine.
bool all_of_smollm2_are_ours() {
  const auto types = own_product_types();
  return types.ok() && std::ranges::count(*types, "Q4_1") == 1 && std::ranges::count(*types, "Q8_0") == 1;
}

TEST(EngineProducts, SmolLM2sWeightsAreAllOursAndGgmlsWhenAsked) {
  const std::string model = smollm2();
  if (model.empty()) GTEST_SKIP() << "no SmolLM2 model: set PAGEDKV_TEST_MODEL, or run tools/model smollm2";
  if (!all_of_smollm2_are_ours()) GTEST_SKIP() << "this CPU has no instruction set of our products";
  const World ours({.model_path = model, .context = Tokens(256), .threads = 1});
  const World ggmls({.model_path = model, .context = Tokens(256), .threads = 1, .products = ProductsChoice::kGgml});
  EXPECT_EQ(ours.engine->products().n_own, 211);
  EXPECT_EQ(ours.engine->products().n_ggml, 0);
  EXPECT_EQ(ggmls.engine->products().n_own, 0);
  EXPECT_EQ(ggmls.engine->products().n_ggml, 211);
  // K and V of one must not be found by the other.
  EXPECT_NE(ours.engine->cache_options().fingerprint, ggmls.engine->cache_options().fingerprint);
  EXPECT_EQ(ggmls.engine->cache_options().fingerprint, ggmls.engine->model().fingerprint);
}

TEST(EngineProducts, SmolLM2sLogitsAreReproducibleUnasked) {
  const std::string model = smollm2();
  if (model.empty()) GTEST_SKIP() << "no SmolLM2 model: set PAGEDKV_TEST_MODEL, or run tools/model smollm2";
  if (!all_of_smollm2_are_ours()) GTEST_SKIP() << "this CPU has no instruction set of our products";
  World one({.model_path = model, .context = Tokens(256), .threads = 1});
  World two({.model_path = model, .context = Tokens(256), .threads = 2});
  const auto tokens = random_tokens(60, one.vocab_size(), 3);
  const auto whole = one.logits(tokens, {60});
  EXPECT_EQ(one.logits(tokens, {1, 2, 3, 9, 5, 16, 8}), whole);
  EXPECT_EQ(two.logits(tokens, {13, 1}), whole);
}

}  // namespace
}  // namespace pagedkv::engine
