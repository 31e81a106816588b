// Arguments of append, attend and merge: what an engine hands to the kernels for one layer of one step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "pagedkv/export.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

class StepPlan;

enum class ElementType : uint8_t { kF32, kF16, kBF16 };

// How attention multiplies where K or V is quantized; other formats always take f32.
//   f32   codes become floats: within 1e-5 of attention in double over the stored values
//   int8  queries and weights are rounded to 8 bits (15 where the format is q8), the products are exact integers:
//         faster where KV heads have several query heads. What the rounding costs: docs/numerics.md section 2a
//   auto  what is faster for the format, the shape and this machine's kernels
enum class QueryPath : uint8_t { kAuto, kF32, kInt8 };
PKV_API const char* query_path_name(QueryPath path);  // "auto", "f32", "int8"
// Errors: kInvalidArgument with the three names.
PKV_API Result<QueryPath> parse_query_path(std::string_view word);

// New rows of K or V for the tokens of a step: [n_tokens, num_kv_heads, head_dim], last dimension contiguous.
// Strides are in elements; 0 means dense.
struct KvRows {
  const void* data = nullptr;
  ElementType type = ElementType::kF32;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// One layer's attention of one step. The same struct goes to attend and to merge.
struct AttendArgs {
  const StepPlan& plan;
  int layer = 0;                 // the model's layer index
  int64_t num_q_heads = 0;       // a multiple of the layer's KV heads; 0: equal to them
  const float* q = nullptr;      // [n_tokens, num_q_heads, head_dim_k]
  int64_t q_token_stride = 0;    // elements; 0: dense
  float* out = nullptr;          // [n_tokens, num_q_heads, head_dim_v], dense
  float* lse = nullptr;          // [n_tokens, num_q_heads]: log-sum-exp of the row's logits, natural; may be null
  float scale = 0;               // multiplies q.k; 0: 1/sqrt(head_dim_k)
  float softcap = 0;             // logits become softcap * tanh(logit / softcap) before the mask; 0: off
  int64_t sliding_window = 0;    // a window narrower than the group's; 0: the group's
  const float* sinks = nullptr;  // [num_q_heads] logits that join each row's denominator once; may be null
  std::span<std::byte> scratch;  // Cache::scratch_bytes, 64-byte aligned, the same for all layers
};

// Joins two partial results over disjoint keys into a: (out_a, lse_a) += (out_b, lse_b), row by row.
//   out  [n_rows, head_dim]   lse  [n_rows], -inf for a row that saw no key
// A row that is empty on both sides stays out 0, lse -inf.
// Source: FlashInfer's merge of attention states, arXiv 2501.01005, section 2.2.
PKV_API void merge_states(float* out_a, float* lse_a, const float* out_b, const float* lse_b, int64_t n_rows,
                          int64_t head_dim);

}  // namespace pagedkv
