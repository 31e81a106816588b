// Rows read back as floats, for interoperability and tests: attention never does.

#include <algorithm>

#include "api/cache_impl.h"

namespace pagedkv {

Result<Cache::Dense> Cache::read_dense(SequenceId sequence, int layer) const {
  const auto at = impl_->place(layer);
  if (!at.ok()) return at.status();
  const auto length = impl_->core->length(sequence);
  const auto table = impl_->core->table(sequence, at->group);
  if (!length.ok()) return length.status();
  if (!table.ok()) return table.status();
  const LayerShape& shape = impl_->options.groups[size_t(at->group)].shape;
  Dense dense{.k = std::vector<float>(size_t(*length * shape.num_kv_heads * shape.head_dim_k)),
              .v = std::vector<float>(size_t(*length * shape.num_kv_heads * shape.head_dim_v))};
  std::vector<int32_t> blocks(table->size());
  std::ranges::transform(*table, blocks.begin(), [](BlockId id) { return int32_t(id); });
  const auto rows = [&](std::vector<float>& to, int64_t head_dim) {
    return DenseRows{.data = to.data(), .token_stride = shape.num_kv_heads * head_dim, .head_stride = head_dim};
  };
  if (Status status =
          impl_->decode(*at, blocks, 0, *length, rows(dense.k, shape.head_dim_k), rows(dense.v, shape.head_dim_v));
      !status.ok())
    return status;
  return dense;
}

Status Cache::read_dense(const StepPlan& plan, int64_t place, int layer, Tokens first, const DenseRows& k,
                         const DenseRows& v) const {
  const auto at = impl_->place(layer);
  if (!at.ok()) return at.status();
  const StepPlan::Impl& step = plan.impl();
  if (Status status = impl_->check_plan(step); !status.ok()) return status;
  const StepArrays& arrays = step.arrays;
  if (place < 0 || place >= int64_t(arrays.seq_lens.size()))
    return invalid_argument(str("[read_dense] sequence ", place, " of a plan of ", arrays.seq_lens.size()));
  const int64_t length = arrays.seq_lens[size_t(place)];
  if (first.n < 0 || first.n > length)
    return invalid_argument(str("[read_dense] first is ", first.n, ", the sequence has ", length, " tokens"));
  const StepArrays::Group& group = arrays.groups[size_t(at->group)];
  const std::span table(group.block_tables.data() + place * group.max_blocks, size_t(group.max_blocks));
  return impl_->decode(*at, table, first.n, length, k, v);
}

Status Cache::Impl::decode(LayerPlace at, std::span<const int32_t> table, int64_t first, int64_t length,
                           const DenseRows& k, const DenseRows& v) const {
  const kernels::LayerStore& layer = store(at);
  const int64_t first_block = first / layer.block_size;
  const int64_t end_block = blocks_for(Tokens(length), Tokens(layer.block_size)).n;
  for (int64_t b = first_block; b < end_block; ++b)
    if (table[size_t(b)] < 0)
      return invalid_argument(str("[read_dense] the window has given the rows of positions ", b * layer.block_size,
                                  " to ", (b + 1) * layer.block_size - 1, " back"));
  const auto decode_rows = [&](const kernels::RowStore& rows, const DenseRows& to) {
    // Where a block's rows of a head follow each other here and there, one call decodes them all.
    const bool runs = rows.slot_stride == row_bytes(rows.format, rows.head_dim).n &&
                      (rows.scales == nullptr || rows.scale_slot_stride == 4) && to.token_stride == rows.head_dim;
    for (int64_t b = first_block; b < end_block; ++b) {
      const int64_t begin = std::max(first, b * layer.block_size);
      const int64_t end = std::min(length, (b + 1) * layer.block_size);
      const int64_t step = runs ? end - begin : 1;
      for (int64_t head = 0; head < layer.num_kv_heads; ++head)
        for (int64_t position = begin; position < end; position += step) {
          const int64_t slot = position - b * layer.block_size, block = table[size_t(b)];
          const std::byte* row =
              rows.rows + block * rows.block_stride + slot * rows.slot_stride + head * rows.head_stride;
          const std::byte* scale = rows.scales == nullptr
                                       ? nullptr
                                       : rows.scales + block * rows.scale_block_stride +
                                             slot * rows.scale_slot_stride + head * rows.scale_head_stride;
          entry->dequantize(row, reinterpret_cast<const float*>(scale), step, rows.head_dim, rows.format,
                            to.data + (position - first) * to.token_stride + head * to.head_stride);
        }
    }
  };
  decode_rows(layer.k, k);
  decode_rows(layer.v, v);
  ++dense_materializations;
  dequantized_rows += 2 * (length - first) * layer.num_kv_heads;
  return Status();
}

}  // namespace pagedkv
