// Where ggml's graph meets pagedkv's matrix products: a weight that is ours enters the graph as
//
//   quantize(x) -> multiply(w)
//
// with one quantize node for all weights that meet the same x. Where x is small, as in the steps of answers, every
// thread quantizes it for itself: that is less than the wait for one more node. All other weights are ggml's.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "pagedkv/products.h"
#include "pagedkv/scratch.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

// Which weights are ours on this machine, and what their products work in. Const members: any thread.
class Products {
 public:
  // Errors: those of MatrixProducts::create, kNoMemory.
  static Result<std::unique_ptr<Products>> create(ProductsChoice choice, int threads);

  // A fixed table of format, shape and instruction set: the same for every number of tokens, on every run.
  bool takes(const ggml_tensor& weight) const;
  std::string_view isa() const { return products_.isa(); }
  // What goes into cache keys: K and V differ in their last bits by who multiplied. Empty where all weights are
  // ggml's.
  std::string key(std::span<const ggml_tensor* const> weights) const;

 private:
  friend class ProductNodes;
  Products(MatrixProducts products, ProductsChoice choice) : products_(products), choice_(choice) {}

  MatrixProducts products_;
  ProductsChoice choice_;
  Scratch memory_;
  std::byte* scratch_ = nullptr;  // in it, of every thread, one after another
};

// The product nodes of one graph, which they must outlive: the graph points into them.
class ProductNodes {
 public:
  explicit ProductNodes(const Products& products) : products_(products) {}
  ProductNodes(const ProductNodes&) = delete;
  ProductNodes& operator=(const ProductNodes&) = delete;

  //   w  [n_in, n_out]      x  [n_in, n_tokens] f32, elements of a token next to one another
  // Returns [n_out, n_tokens] f32.
  ggml_tensor* build(ggml_context* ctx, ggml_tensor* w, ggml_tensor* x);

 private:
  ggml_tensor* quantized(ggml_context* ctx, ggml_tensor* x);

  static void quantize(ggml_tensor* dst, int ith, int nth, void* products);
  static void multiply(ggml_tensor* dst, int ith, int nth, void* products);
  static void multiply_small(ggml_tensor* dst, int ith, int nth, void* products);
  static void multiply_quantized(const Products& products, const std::byte* x, ggml_tensor* dst, int ith, int nth);

  const Products& products_;
  std::vector<std::pair<ggml_tensor*, ggml_tensor*>> quantized_;  // x and its codes
};

}  // namespace pagedkv::engine
