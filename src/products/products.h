// The contract between the library and its matrix products: plain structs over memory that others own.
//
// As for the kernels of attention: no threads, no memory of their own, no environment. Every entry (scalar, avx2,
// avx512, avx512_vnni) gives the same bits, whatever shares a call is cut into: docs/numerics.md, section 6, has
// the one order in which all of them add.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "pagedkv/products.h"

namespace pagedkv::products {

inline constexpr int64_t kGroup = 32;        // elements that share a scale of the activations
inline constexpr float kLeast = 0x1p-100f;   // a group whose largest value is less is taken for 0
inline constexpr int64_t kFewTokens = 8;     // up to here weights are unpacked into registers, above into panels
inline constexpr int64_t kPanelRows = 32;    // of the widest entry; a weight has at least as many
inline constexpr int64_t kMostDepth = 768;   // elements of a row that a panel holds at once
inline constexpr int64_t kDepth = 512;       // the same where rows are longer than kMostDepth
inline constexpr int64_t kMostTokens = 516;  // of one pass over a panel: bounds the scratch
inline constexpr int64_t kSharedPanels = 4;  // panels in a row that read the same part of the activations

// [n_out, n_in], a row after the other in the blocks of `format`.
struct Weights {
  const uint8_t* data = nullptr;
  int64_t row_bytes = 0;
  int64_t n_out = 0;
  int64_t n_in = 0;
  WeightFormat format = WeightFormat::kQ40;
};

// Vectors as 8-bit codes with a scale a group.
struct Activations {
  int8_t* codes = nullptr;       // [n_tokens] rows of code_stride bytes
  float* scales = nullptr;       // [n_tokens, n_groups]
  float* shifts = nullptr;       // [n_tokens, n_groups] scale * sum of the group's codes
  int32_t* sums = nullptr;       // [n_tokens, n_groups] of codes
  int32_t* half_sums = nullptr;  // [n_tokens, n_groups, 2] of each half's codes
  int64_t code_stride = 0;
  int64_t n_groups = 0;
  int64_t n_tokens = 0;
};

struct QuantizeCall {
  const float* x = nullptr;  // [n_tokens] rows of x_stride floats
  int64_t x_stride = 0;
  Activations to;
  int64_t token_begin = 0, token_end = 0;
};

// y[token, out] for a rectangle of tokens and outputs. `out_begin` is a multiple of kPanelRows or, for kFewTokens
// and less, of 16; `out_end` as well, unless it is n_out.
struct ProductCall {
  Weights weights;
  Activations x;
  float* y = nullptr;
  int64_t y_stride = 0;
  int64_t out_begin = 0, out_end = 0;
  int64_t token_begin = 0, token_end = 0;
  std::byte* scratch = nullptr;  // kScratchBytes, aligned to 64; of this call alone
};

inline constexpr int64_t kScratchBytes =
    kPanelRows * (kMostDepth + (kMostDepth / kGroup) * 3 * int64_t{sizeof(float)}) +
    kSharedPanels * kPanelRows * kMostTokens * int64_t{sizeof(float)};

struct Entry {
  std::string_view name;
  bool (*supported)() = nullptr;
  void (*quantize)(const QuantizeCall&) = nullptr;
  void (*product)(const ProductCall&) = nullptr;
};

// Best first.
std::span<const Entry> entries();
// The best for an empty name. Null where the name is unknown or this machine cannot run it.
const Entry* find_entry(std::string_view name);

// What each instruction set's unit hands to the table in entries.cc; null where this build does not have it.
struct IsaFunctions {
  decltype(Entry::quantize) quantize;
  decltype(Entry::product) product;
};
const IsaFunctions* scalar_functions();
const IsaFunctions* avx2_functions();
const IsaFunctions* avx512_functions();
const IsaFunctions* avx512_vnni_functions();

}  // namespace pagedkv::products
