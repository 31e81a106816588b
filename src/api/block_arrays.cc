// Append and attention over block tensors of somebody else: the kernels of a Cache, without one.

#include "pagedkv/block_arrays.h"

#include <algorithm>

#include "api/isa.h"
#include "api/layer_attention.h"
#include "api/query_path.h"
#include "base/text.h"
#include "kernels/kernels.h"
#include "store/image_layout.h"

namespace pagedkv {
namespace {

int64_t element_bytes(Format format) {
  if (is_quantized(format)) return 1;
  return format == Format::kF32 ? 4 : 2;
}

// One tensor must be [num_blocks, block_size, num_kv_heads, width] of elements of this size.
Status check_tensor(const char* name, const TensorView& view, const TensorView& first, int64_t num_kv_heads,
                    int64_t width, int64_t bytes) {
  if (view.data == nullptr) return invalid_argument(str("[block arrays] ", name, " is missing"));
  if (view.shape[0] != first.shape[0] || view.shape[1] != first.shape[1] || view.shape[2] != num_kv_heads ||
      view.shape[3] != width)
    return invalid_argument(str("[block arrays] ", name, " is [", view.shape[0], ", ", view.shape[1], ", ",
                                view.shape[2], ", ", view.shape[3], "], expected [", first.shape[0], ", ",
                                first.shape[1], ", ", num_kv_heads, ", ", width, "]"));
  if (view.element_bytes != bytes || (width > 1 && view.strides[3] != bytes))
    return invalid_argument(str("[block arrays] ", name, " has elements of ", view.element_bytes, " bytes, ",
                                view.strides[3], " apart; its format needs ", bytes, " bytes, contiguous"));
  return Status();
}

kernels::RowStore row_store(const TensorView& rows, const TensorView& scales, Format format, int64_t head_dim) {
  kernels::RowStore store{.rows = rows.data,
                          .block_stride = rows.strides[0],
                          .slot_stride = rows.strides[1],
                          .head_stride = rows.strides[2],
                          .format = format,
                          .head_dim = head_dim};
  if (is_quantized(format)) {
    store.scales = scales.data;
    store.scale_block_stride = scales.strides[0];
    store.scale_slot_stride = scales.strides[1];
    store.scale_head_stride = scales.strides[2];
  }
  return store;
}

Result<kernels::LayerStore> layer_store(const BlockArrays& arrays) {
  const LayerShape& shape = arrays.shape;
  const TensorView& k = arrays.tensors.k;
  if (k.data != nullptr && (k.shape[0] > kMaxBlocks || k.shape[1] < 1 || k.shape[1] > 256))
    return invalid_argument(str("[block arrays] key blocks are ", k.shape[0], " of ", k.shape[1],
                                " tokens, allowed are ", kMaxBlocks, " of 1 to 256"));
  if (shape.num_kv_heads < 1 || shape.num_kv_heads > kMaxHeads)
    return invalid_argument(
        str("[block arrays] num_kv_heads is ", shape.num_kv_heads, ", allowed are 1 to ", kMaxHeads));
  struct Side {
    const char *rows_name, *scales_name;
    const TensorView &rows, &scales;
    Format format;
    int64_t head_dim;
  };
  for (const Side& side :
       {Side{"keys", "key scales", k, arrays.tensors.k_scales, shape.formats.k, shape.head_dim_k},
        Side{"values", "value scales", arrays.tensors.v, arrays.tensors.v_scales, shape.formats.v,
             shape.head_dim_v}}) {
    if (side.head_dim < 1 || side.head_dim > kernels::kMaxHeadDim)
      return invalid_argument(
          str("[block arrays] head_dim is ", side.head_dim, ", allowed are 1 to ", kernels::kMaxHeadDim));
    if (Status status = check_head_dim(side.format, side.head_dim); !status.ok()) return status;
    const int64_t bytes = element_bytes(side.format), width = row_bytes(side.format, side.head_dim).n / bytes;
    if (Status status = check_tensor(side.rows_name, side.rows, k, shape.num_kv_heads, width, bytes); !status.ok())
      return status;
    if (!is_quantized(side.format)) continue;
    if (Status status = check_tensor(side.scales_name, side.scales, k, shape.num_kv_heads, 1, 4); !status.ok())
      return status;
  }
  return kernels::LayerStore{
      .k = row_store(k, arrays.tensors.k_scales, shape.formats.k, shape.head_dim_k),
      .v = row_store(arrays.tensors.v, arrays.tensors.v_scales, shape.formats.v, shape.head_dim_v),
      .block_size = k.shape[1],
      .num_kv_heads = shape.num_kv_heads,
      .num_blocks = k.shape[0]};
}

}  // namespace

Status write_slots(const BlockArrays& arrays, const KvRows& k, const KvRows& v,
                   std::span<const int64_t> slot_mapping) {
  const auto layer = layer_store(arrays);
  if (!layer.ok()) return layer.status();
  if (slot_mapping.empty()) return Status();
  if (k.data == nullptr || v.data == nullptr) return invalid_argument("[write_slots] keys or values are null");
  if (slot_mapping.size() > size_t(kMaxBlocks))
    return invalid_argument(str("[write_slots] ", slot_mapping.size(), " tokens, the limit is ", kMaxBlocks));
  const int64_t n_slots = layer->num_blocks * layer->block_size;
  for (size_t token = 0; token < slot_mapping.size(); ++token)
    if (slot_mapping[token] < -1 || slot_mapping[token] >= n_slots)
      return invalid_argument(str("[write_slots] token ", token, " goes to slot ", slot_mapping[token],
                                  ", the arrays have ", n_slots, " (-1 skips a token)"));
  const auto entry = choose_entry("");
  if (!entry.ok()) return entry.status();
  const auto resolved = [&](KvRows rows, int64_t head_dim) {
    if (rows.head_stride == 0) rows.head_stride = head_dim;
    if (rows.token_stride == 0) rows.token_stride = head_dim * layer->num_kv_heads;
    return rows;
  };
  const int32_t starts[2] = {0, int32_t(slot_mapping.size())};
  uint64_t fault = kernels::kNoFault;
  kernels::AppendCounters counters;
  (*entry)->append({.layer = *layer,
                    .batch = {.n_sequences = 1,
                              .n_tokens = int64_t(slot_mapping.size()),
                              .query_start_loc = starts,
                              .slot_mapping = slot_mapping.data()},
                    .k = resolved(k, arrays.shape.head_dim_k),
                    .v = resolved(v, arrays.shape.head_dim_v),
                    .faults = &fault,
                    .counters = &counters},
                   {});
  if (fault == kernels::kNoFault) return Status();
  return Status(Code::kNotFinite, str("[write_slots] NaN or infinity in KV head ", (fault >> 32) & 0xffff,
                                      ", token ", fault & 0xffffffff));
}

struct BlockAttention::Impl {
  kernels::LayerStore layer;
  kernels::Batch batch;
  kernels::AttendShape shape;
  const kernels::Entry* entry = nullptr;
  kernels::Work work;

  LayerAttention attention() const { return {layer, batch, shape, work, *entry}; }
};

BlockAttention::BlockAttention(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
BlockAttention::BlockAttention(BlockAttention&&) noexcept = default;
BlockAttention::~BlockAttention() = default;

Result<BlockAttention> BlockAttention::plan(const BlockArrays& arrays, const BlockTables& tables,
                                            const BlockAttentionOptions& options) {
  const auto layer = layer_store(arrays);
  if (!layer.ok()) return layer.status();
  const int64_t heads = arrays.shape.num_kv_heads;
  const int64_t num_q_heads = options.num_q_heads == 0 ? heads : options.num_q_heads;
  if (num_q_heads < 0 || num_q_heads > kMaxHeads || num_q_heads % heads != 0)
    return invalid_argument(
        str("[block attention] ", num_q_heads, " query heads are no multiple of ", heads, " KV heads"));
  if (options.sliding_window < 0)
    return invalid_argument(str("[block attention] sliding_window is ", options.sliding_window));
  if (tables.n_sequences < 0 ||
      (tables.n_sequences > 0 && (tables.seq_lens == nullptr || tables.query_start_loc == nullptr)))
    return invalid_argument("[block attention] seq_lens or query_start_loc is missing");
  if (tables.n_sequences > 0 && tables.query_start_loc[0] != 0)
    return invalid_argument(
        str("[block attention] query_start_loc begins with ", tables.query_start_loc[0], ", not 0"));
  for (int64_t s = 0; s < tables.n_sequences; ++s) {
    const int64_t length = tables.seq_lens[s];
    const int64_t rows = int64_t(tables.query_start_loc[s + 1]) - tables.query_start_loc[s];
    if (length < 0 || rows < 0)
      return invalid_argument(
          str("[block attention] sequence ", s, " has ", length, " tokens and ", rows, " query rows"));
    const int64_t used = blocks_for(Tokens(length), Tokens(layer->block_size)).n;
    if (used > tables.max_blocks)
      return invalid_argument(str("[block attention] sequence ", s, " has ", length, " tokens: ", used,
                                  " blocks, its table row has ", tables.max_blocks));
    // Blocks behind the window of the first query are not read, and may be gone.
    const int64_t first =
        options.sliding_window > 0 ? std::max<int64_t>(0, length - rows + 1 - options.sliding_window) : 0;
    for (int64_t b = first / layer->block_size; b < used; ++b) {
      const int64_t id = tables.block_tables[s * tables.max_blocks + b];
      if (id < 0 || id >= layer->num_blocks)
        return invalid_argument(str("[block attention] block_tables[", s, ", ", b, "] is ", id,
                                    ", the arrays have ", layer->num_blocks, " blocks"));
    }
  }
  const auto entry = choose_entry(options.isa);
  if (!entry.ok()) return entry.status();
  auto impl = std::make_unique<Impl>();
  const ProductPaths paths = choose_paths(options.query_path, arrays.shape.formats, num_q_heads / heads, **entry);
  impl->layer = *layer;
  impl->entry = *entry;
  impl->shape = {.num_q_heads = num_q_heads,
                 .sliding_window = options.sliding_window,
                 .k_codes = paths.k_codes,
                 .v_codes = paths.v_codes};
  impl->batch = {.n_sequences = tables.n_sequences,
                 .n_tokens = tables.n_sequences > 0 ? tables.query_start_loc[tables.n_sequences] : 0,
                 .max_blocks = tables.max_blocks,
                 .block_tables = tables.block_tables,
                 .seq_lens = tables.seq_lens,
                 .query_start_loc = tables.query_start_loc};
  plan_work(impl->batch, options.sliding_window, heads, impl->work);
  return BlockAttention(std::move(impl));
}

Bytes BlockAttention::scratch_bytes(int n_parts) const {
  if (impl_ == nullptr) return Bytes(0);
  return Bytes(std::max<int64_t>(64, impl_->attention().scratch_bytes(n_parts)));
}

Status BlockAttention::attend(const Args& args, Part part) const {
  if (impl_ == nullptr) return invalid_argument("[block attention] the plan was moved from");
  const auto call = impl_->attention().call("block attention", args, 0, part);
  if (!call.ok()) return call.status();
  impl_->entry->attend(*call, part);
  return Status();
}

Status BlockAttention::merge(const Args& args, Part part) const {
  if (impl_ == nullptr) return invalid_argument("[block attention] the plan was moved from");
  const auto call = impl_->attention().call("block attention", args, 0, part);
  if (!call.ok()) return call.status();
  impl_->entry->merge(*call, part);
  return Status();
}

}  // namespace pagedkv
