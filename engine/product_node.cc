#include "engine/product_node.h"

#include <set>
#include <utility>

namespace pagedkv::engine {
namespace {

constexpr int kVersion = 1;  // of the order in which products are added (docs/numerics.md, section 6)
// Of codes that every thread makes for itself: a microsecond's work.
constexpr int64_t kSmallBytes = 16 << 10;

std::optional<WeightFormat> format_of(ggml_type type) {
  switch (type) {
    case GGML_TYPE_Q4_0:
      return WeightFormat::kQ40;
    case GGML_TYPE_Q4_1:
      return WeightFormat::kQ41;
    case GGML_TYPE_Q5_0:
      return WeightFormat::kQ50;
    case GGML_TYPE_Q5_1:
      return WeightFormat::kQ51;
    case GGML_TYPE_Q8_0:
      return WeightFormat::kQ80;
    case GGML_TYPE_IQ4_NL:
      return WeightFormat::kIQ4NL;
    case GGML_TYPE_Q3_K:
      return WeightFormat::kQ3K;
    case GGML_TYPE_Q4_K:
      return WeightFormat::kQ4K;
    case GGML_TYPE_Q5_K:
      return WeightFormat::kQ5K;
    case GGML_TYPE_Q6_K:
      return WeightFormat::kQ6K;
    case GGML_TYPE_IQ4_XS:
      return WeightFormat::kIQ4XS;
    default:
      return std::nullopt;
  }
}

// Where ours is nowhere slower than ggml's, from one token to many (docs/benchmarks.md). Unpacking Q6_K takes AVX2
// as long as reading it: one token is slower there.
bool is_ours(WeightFormat format, const MatrixProducts& products) {
  return products.fast() && !(format == WeightFormat::kQ6K && products.isa() == "avx2");
}

// Of a thread: the codes of a small x, and multiply's own scratch, both aligned to 64.
int64_t thread_bytes() { return kSmallBytes + (MatrixProducts::scratch_bytes() + 63) / 64 * 64; }

bool is_small(const ggml_tensor* x) { return MatrixProducts::quantized_bytes(x->ne[0], x->ne[1]) <= kSmallBytes; }
int64_t stride_of(const ggml_tensor* x) { return int64_t(x->nb[1] / sizeof(float)); }

}  // namespace

std::string_view products_choice_name(ProductsChoice choice) {
  return choice == ProductsChoice::kAuto ? "auto" : "ggml";
}

Result<ProductsChoice> parse_products_choice(const std::string& word) {
  for (const ProductsChoice choice : {ProductsChoice::kAuto, ProductsChoice::kGgml})
    if (word == products_choice_name(choice)) return choice;
  return invalid_argument("products is \"" + word + "\", allowed are auto, ggml");
}

Result<std::vector<std::string>> own_product_types() {
  const auto products = MatrixProducts::create();
  if (!products.ok()) return products.status();
  std::vector<std::string> names;
  for (int i = 0; i < GGML_TYPE_COUNT; ++i)
    if (const auto format = format_of(ggml_type(i)); format && is_ours(*format, *products))
      names.emplace_back(weight_format_name(*format));
  return names;
}

Result<std::unique_ptr<Products>> Products::create(ProductsChoice choice, int threads) {
  auto products = MatrixProducts::create();
  if (!products.ok()) return products.status();
  std::unique_ptr<Products> out(new Products(*products, choice));
  const auto scratch = out->memory_.get(Bytes(thread_bytes() * threads));
  if (!scratch.ok()) return scratch.status();
  out->scratch_ = scratch->data();
  return out;
}

bool Products::takes(const ggml_tensor& weight) const {
  if (choice_ == ProductsChoice::kGgml) return false;
  const auto format = format_of(weight.type);
  const bool matrix = weight.ne[2] == 1 && weight.ne[3] == 1;
  return format && is_ours(*format, products_) && matrix &&
         MatrixProducts::takes(*format, weight.ne[1], weight.ne[0]);
}

std::string Products::key(std::span<const ggml_tensor* const> weights) const {
  std::set<std::string_view> ours;
  for (const ggml_tensor* w : weights)
    if (takes(*w)) ours.insert(ggml_type_name(w->type));
  if (ours.empty()) return "";
  std::string key = " products " + std::to_string(kVersion) + ":";
  for (std::string_view name : ours) key.append(" ").append(name);
  return key;
}

ggml_tensor* ProductNodes::quantized(ggml_context* ctx, ggml_tensor* x) {
  for (const auto& [of, codes] : quantized_)
    if (of == x) return codes;
  ggml_tensor* args[] = {x};
  ggml_tensor* codes = ggml_custom_4d(ctx, GGML_TYPE_I8, MatrixProducts::quantized_bytes(x->ne[0], x->ne[1]), 1, 1,
                                      1, args, 1, quantize, GGML_N_TASKS_MAX, const_cast<Products*>(&products_));
  quantized_.emplace_back(x, codes);
  return codes;
}

ggml_tensor* ProductNodes::build(ggml_context* ctx, ggml_tensor* w, ggml_tensor* x) {
  if (!products_.takes(*w) || x->type != GGML_TYPE_F32 || x->nb[0] != sizeof(float) || x->ne[2] != 1 ||
      x->ne[3] != 1)
    return ggml_mul_mat(ctx, w, x);
  const bool small = is_small(x);
  ggml_tensor* args[] = {small ? x : quantized(ctx, x), w};
  return ggml_custom_4d(ctx, GGML_TYPE_F32, w->ne[1], x->ne[1], 1, 1, args, 2, small ? multiply_small : multiply,
                        GGML_N_TASKS_MAX, const_cast<Products*>(&products_));
}

void ProductNodes::quantize(ggml_tensor* dst, int ith, int nth, void* userdata) {
  const auto& products = *static_cast<const Products*>(userdata);
  const ggml_tensor* x = dst->src[0];
  // takes() has asked for what could be refused here.
  static_cast<void>(products.products_.quantize(static_cast<const float*>(x->data), stride_of(x), x->ne[0],
                                                x->ne[1], static_cast<std::byte*>(dst->data), {ith, nth}));
}

void ProductNodes::multiply(ggml_tensor* dst, int ith, int nth, void* userdata) {
  const auto& products = *static_cast<const Products*>(userdata);
  multiply_quantized(products, static_cast<const std::byte*>(dst->src[0]->data), dst, ith, nth);
}

void ProductNodes::multiply_small(ggml_tensor* dst, int ith, int nth, void* userdata) {
  const auto& products = *static_cast<const Products*>(userdata);
  const ggml_tensor* x = dst->src[0];
  std::byte* codes = products.scratch_ + ith * thread_bytes();
  static_cast<void>(products.products_.quantize(static_cast<const float*>(x->data), stride_of(x), x->ne[0],
                                                x->ne[1], codes, {0, 1}));
  multiply_quantized(products, codes, dst, ith, nth);
}

void ProductNodes::multiply_quantized(const Products& products, const std::byte* x, ggml_tensor* dst, int ith,
                                      int nth) {
  const ggml_tensor* w = dst->src[1];
  const MatrixProducts::Call call{.weight = {.data = static_cast<const std::byte*>(w->data),
                                             .format = *format_of(w->type),
                                             .n_out = w->ne[1],
                                             .n_in = w->ne[0],
                                             .row_bytes = int64_t(w->nb[1])},
                                  .x = x,
                                  .n_tokens = dst->ne[1],
                                  .y = static_cast<float*>(dst->data),
                                  .y_stride = dst->ne[0],
                                  .scratch = products.scratch_ + ith * thread_bytes() + kSmallBytes};
  static_cast<void>(products.products_.multiply(call, {ith, nth}));
}

}  // namespace pagedkv::engine
