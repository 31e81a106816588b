// One layer's attention over planned work, as Cache and BlockAttention both hand it to the kernels.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/text.h"
#include "kernels/kernels.h"
#include "kernels/plan/work.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

inline Status check_part(const char* where, Part part) {
  if (part.count >= 1 && part.index >= 0 && part.index < part.count) return Status();
  return invalid_argument(
      str("[", where, "] part ", part.index, " of ", part.count, "; a part is 0 to count - 1 of 1 or more"));
}

struct LayerAttention {
  kernels::LayerStore layer;
  kernels::Batch batch;
  kernels::AttendShape shape;
  const kernels::Work& work;
  const kernels::Entry& entry;

  int64_t partial_bytes() const {
    return work.partial_rows * shape.num_q_heads * kernels::partial_floats(layer.v.head_dim) *
           int64_t(sizeof(float));
  }
  int64_t part_bytes() const { return entry.part_scratch_bytes(layer, shape); }
  int64_t scratch_bytes(int n_parts) const { return partial_bytes() + part_bytes() * n_parts; }

  // args: AttendArgs or BlockAttention::Args. q_token_stride in elements, 0: dense. Errors: kInvalidArgument for
  // what args says of scale, softcap, scratch, for the part, and for missing arrays, beginning with `where`.
  template <class Args>
  Result<kernels::AttendCall> call(const char* where, const Args& args, int64_t q_token_stride, Part part) const {
    if (Status status = check_part(where, part); !status.ok()) return status;
    if (batch.n_tokens > 0 && (args.q == nullptr || args.out == nullptr))
      return invalid_argument(str("[", where, "] q or out is null"));
    if (args.scale < 0 || !std::isfinite(args.scale) || args.softcap < 0 || !std::isfinite(args.softcap))
      return invalid_argument(str("[", where, "] scale is ", args.scale, " and softcap ", args.softcap,
                                  "; both must be finite and >= 0"));
    if (int64_t(args.scratch.size()) < scratch_bytes(part.count))
      return invalid_argument(str("[", where, "] scratch has ", args.scratch.size(), " bytes, ", part.count,
                                  " parts need ", scratch_bytes(part.count)));
    if (reinterpret_cast<uintptr_t>(args.scratch.data()) % 64 != 0)
      return invalid_argument(str("[", where, "] scratch is not 64-byte aligned"));
    return kernels::AttendCall{
        .layer = layer,
        .batch = batch,
        .shape = shape,
        .items = work.items.data(),
        .n_items = int64_t(work.items.size()),
        .merges = work.merges.data(),
        .n_merges = int64_t(work.merges.size()),
        .total_cost = work.total_cost,
        .q = args.q,
        .q_token_stride = q_token_stride != 0 ? q_token_stride : shape.num_q_heads * layer.k.head_dim,
        .out = args.out,
        .lse = args.lse,
        .scale = args.scale != 0 ? args.scale : 1.0f / std::sqrt(float(layer.k.head_dim)),
        .softcap = args.softcap,
        .sinks = args.sinks,
        .partials = reinterpret_cast<float*>(args.scratch.data()),
        .part_scratch = args.scratch.data() + partial_bytes(),
        .part_scratch_bytes = part_bytes()};
  }
};

}  // namespace pagedkv
