// append, quantize, dequantize. Compiled once per instruction set.
#pragma once

#include "kernels/rows-inl.h"

namespace pagedkv::kernels::PKV_ISA {
namespace {

// Row `index` of the step's new rows as floats, zero-filled to a whole number of Vecs.
PKV_INLINE void fetch_row(const KvRows& rows, int64_t token, int64_t head, int64_t head_dim, RowBuffer& buffer) {
  const int64_t offset = token * rows.token_stride + head * rows.head_stride;
  const int64_t padded = round_up(head_dim, 16);
  for (int64_t i = head_dim; i < padded; ++i) buffer.x[i] = 0;
  if (rows.type == ElementType::kF32) {
    __builtin_memcpy(buffer.x, static_cast<const float*>(rows.data) + offset, size_t(head_dim) * 4);
    return;
  }
  const uint8_t* halves = reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(rows.data) + offset);
  (rows.type == ElementType::kF16 ? decode_row<F16Codec> : decode_row<BF16Codec>)(halves, head_dim * 2, buffer.x);
}

// False: the row holds a NaN or an infinity, and nothing was written.
PKV_INLINE bool write_row(const RowStore& store, const KvRows& rows, int64_t token, int64_t head, int64_t block,
                          int64_t slot, RowBuffer& buffer, EncodeCounts& counts) {
  fetch_row(rows, token, head, store.head_dim, buffer);
  if (!is_finite_row(buffer, store.head_dim)) return false;
  uint8_t* out = reinterpret_cast<uint8_t*>(store.rows) + block * store.block_stride + slot * store.slot_stride +
                 head * store.head_stride;
  float scale = 0;
  encode_row(buffer, store.head_dim, store.format, out, &scale, counts);
  if (has_scales(store.format)) {
    uint8_t* place = reinterpret_cast<uint8_t*>(store.scales) + block * store.scale_block_stride +
                     slot * store.scale_slot_stride + head * store.scale_head_stride;
    copy_bytes(place, &scale, sizeof scale);
  }
  return true;
}

void record_fault(const AppendCall& call, int64_t token, int64_t head) {
  int64_t sequence = 0;
  while (sequence + 1 < call.batch.n_sequences && call.batch.query_start_loc[sequence + 1] <= token) ++sequence;
  const uint64_t fault = uint64_t(call.layer_index) << 48 | uint64_t(head) << 32 | uint64_t(token);
  uint64_t* place = call.faults + sequence;
  uint64_t seen = __atomic_load_n(place, __ATOMIC_RELAXED);
  while (fault < seen &&
         !__atomic_compare_exchange_n(place, &seen, fault, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace

// Parts share the flat (token, KV head) grid.
void append(const AppendCall& call, Part part) {
  const LayerStore& layer = call.layer;
  const int64_t heads = layer.num_kv_heads, n_rows = call.batch.n_tokens * heads;
  const int64_t begin = n_rows * part.index / part.count, end = n_rows * (part.index + 1) / part.count;
  RowBuffer buffer;
  EncodeCounts counts;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row / heads, head = row % heads;
    const int64_t place = call.batch.slot_mapping[token];
    if (place < 0 || place / layer.block_size >= layer.num_blocks) continue;
    const int64_t block = place / layer.block_size, slot = place % layer.block_size;
    const bool k_ok = write_row(layer.k, call.k, token, head, block, slot, buffer, counts);
    const bool v_ok = write_row(layer.v, call.v, token, head, block, slot, buffer, counts);
    if (!k_ok || !v_ok) record_fault(call, token, head);
  }
  if (counts.floor_clamped != 0) {
    __atomic_fetch_add(&call.counters->floor_clamped_rows, counts.floor_clamped, __ATOMIC_RELAXED);
  }
  if (counts.saturated != 0) {
    __atomic_fetch_add(&call.counters->saturated_values, counts.saturated, __ATOMIC_RELAXED);
  }
}

int64_t quantize(const float* x, int64_t n_rows, int64_t head_dim, Format format, std::byte* rows, float* scales) {
  const KvRows source{.data = x, .type = ElementType::kF32, .token_stride = head_dim, .head_stride = head_dim};
  const int64_t row_bytes = packed_bytes(format, head_dim);
  RowBuffer buffer;
  EncodeCounts counts;
  for (int64_t row = 0; row < n_rows; ++row) {
    fetch_row(source, row, 0, head_dim, buffer);
    if (!is_finite_row(buffer, head_dim)) return row;
    float unused;
    encode_row(buffer, head_dim, format, reinterpret_cast<uint8_t*>(rows) + row * row_bytes,
               has_scales(format) ? scales + row : &unused, counts);
  }
  return -1;
}

void dequantize(const std::byte* rows, const float* scales, int64_t n_rows, int64_t head_dim, Format format,
                float* out) {
  const DecodeRow decode = decoder_of(format);
  const int64_t row_bytes = packed_bytes(format, head_dim);
  alignas(64) float lanes[kMaxHeadDim + 32];
  for (int64_t row = 0; row < n_rows; ++row) {
    decode(reinterpret_cast<const uint8_t*>(rows) + row * row_bytes, row_bytes, lanes);
    const float scale = has_scales(format) ? scales[row] : 1.0f;
    for (int64_t i = 0; i < head_dim; ++i) out[row * head_dim + i] = lanes[lane_of(format, i)] * scale;
  }
}

}  // namespace pagedkv::kernels::PKV_ISA
