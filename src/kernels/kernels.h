// The contract between the library and its kernels: plain structs over memory that others own.
//
// Kernels own no threads and no memory, read no environment and know no cache. Every entry (scalar, avx2, avx512,
// neon) offers the same functions; entries() lists them best first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "pagedkv/attention.h"
#include "pagedkv/format.h"
#include "pagedkv/units.h"

namespace pagedkv::kernels {

// Split boundaries are fixed positions of a sequence, never a matter of threads: equal bits for any partition.
inline constexpr int64_t kRunTokens = 256;   // one partial result of a split row covers one run
inline constexpr int64_t kTileTokens = 64;   // softmax is rescaled once a tile; kRunTokens is a multiple
inline constexpr int64_t kRowTile = 64;      // query tokens of one unsplit item
inline constexpr int64_t kMaxSplitRows = 8;  // sequences with more new tokens than this are not split by runs
inline constexpr int64_t kMaxHeadDim = 1024;

// Where the rows of one layer's K or V lie. Row of (block, slot, head):
//   rows + block * block_stride + slot * slot_stride + head * head_stride
struct RowStore {
  std::byte* rows = nullptr;
  int64_t block_stride = 0, slot_stride = 0, head_stride = 0;  // bytes
  std::byte* scales = nullptr;                                 // f32; null for formats without scales
  int64_t scale_block_stride = 0, scale_slot_stride = 0, scale_head_stride = 0;  // bytes
  Format format = Format::kF16;
  int64_t head_dim = 0;
};

struct LayerStore {
  RowStore k, v;
  int64_t block_size = 0;
  int64_t num_kv_heads = 0;
  int64_t num_blocks = 0;  // ids at or past this are skipped: never read, never written
};

// The integer arrays of a step, for one group.
struct Batch {
  int64_t n_sequences = 0;
  int64_t n_tokens = 0;
  int64_t max_blocks = 0;                    // width of a row of block_tables
  const int32_t* block_tables = nullptr;     // [n_sequences, max_blocks]
  const int32_t* seq_lens = nullptr;         // [n_sequences] after the new tokens
  const int32_t* query_start_loc = nullptr;  // [n_sequences + 1]
  const int64_t* slot_mapping = nullptr;     // [n_tokens], -1 = skip
};

// First bad row of a sequence (by layer, KV head, token; K and V alike), or kNoFault. Written with an atomic
// minimum by any part.
//   bits 48-62 layer, 32-47 KV head, 0-31 token index in the step
inline constexpr uint64_t kNoFault = ~uint64_t{0};

struct AppendCounters {  // added to atomically, once a call
  int64_t floor_clamped_rows = 0;
  int64_t saturated_values = 0;
};

struct AppendCall {
  LayerStore layer;
  Batch batch;
  KvRows k, v;  // strides resolved: never 0
  int layer_index = 0;
  uint64_t* faults = nullptr;  // [n_sequences]
  AppendCounters* counters = nullptr;
};

// Query tokens [row_begin, row_end) of one sequence (indices into the step's tokens) over runs [run_begin,
// run_end), for every KV head: the unit that parts share out is one (item, KV head), all heads of an item in a row.
// A split item covers one run and writes partials; an unsplit one covers all its runs and writes the finished rows.
struct WorkItem {
  int32_t sequence = 0;
  int32_t row_begin = 0, row_end = 0;
  int32_t run_begin = 0, run_end = 0;
  int64_t partial = -1;     // the first of its rows of partials, one partial a query head each; -1: unsplit
  int64_t cost = 0;         // of one KV head: about token-rows
  int64_t cost_before = 0;  // of all items before this one, all their KV heads
};

// A split sequence's rows, to be merged: partials of (row, q head) for its runs.
//   partial index = (partial_begin + (run - run_begin) * n_rows + row) * num_q_heads + q_head
struct MergeItem {
  int32_t sequence = 0;
  int32_t row_begin = 0, row_end = 0;
  int32_t run_begin = 0, run_end = 0;
  int64_t partial_begin = 0;  // row of partials
};

struct AttendShape {
  int64_t num_q_heads = 0;
  int64_t sliding_window = 0;  // 0: none
  // Products over the codes themselves, in integers: queries rounded to int8 for K, weights to 8 bits for V. Only
  // for formats with codes.
  bool k_codes = false, v_codes = false;
};

// Items and merges are pointers with counts, not spans: the units of an instruction set must not instantiate std
// code, because the linker may keep their copy for everyone.
struct AttendCall {
  LayerStore layer;
  Batch batch;
  AttendShape shape;
  const WorkItem* items = nullptr;
  int64_t n_items = 0;
  const MergeItem* merges = nullptr;
  int64_t n_merges = 0;
  int64_t total_cost = 0;      // of all items, all KV heads
  const float* q = nullptr;    // [n_tokens, num_q_heads, head_dim_k]
  int64_t q_token_stride = 0;  // elements, never 0
  float* out = nullptr;        // [n_tokens, num_q_heads, head_dim_v]
  float* lse = nullptr;        // [n_tokens, num_q_heads] or null; a sink is in it, if the row sees any key
  float scale = 1, softcap = 0;
  const float* sinks = nullptr;
  float* partials = nullptr;          // [partial rows, num_q_heads, partial_floats(head_dim_v)], 64-byte aligned
  std::byte* part_scratch = nullptr;  // [n_parts, part_scratch_bytes], 64-byte aligned
  int64_t part_scratch_bytes = 0;
};

// Floats of one partial: sums of p*v in the entry's lane order, padded to 64; then the row maximum, the row sum.
// Always inline: kernels call it, and a copy of its own would be a weak symbol with their instructions.
[[gnu::always_inline]] constexpr int64_t partial_floats(int64_t head_dim_v) {
  return (head_dim_v + 63) / 64 * 64 + 16;
}

// One instruction set's kernels.
struct Entry {
  std::string_view name;  // scalar, neon, avx2, avx512, avx512_vnni
  bool (*supported)();    // does this CPU run it
  bool has_byte_dots;     // adds up four products of bytes in one instruction
  void (*append)(const AppendCall& call, Part part);
  void (*attend)(const AttendCall& call, Part part);
  void (*merge)(const AttendCall& call, Part part);
  // Scratch one part of attend needs for this layer shape (64-byte multiple).
  int64_t (*part_scratch_bytes)(const LayerStore& layer, const AttendShape& shape);
  // n_rows rows of head_dim values to packed rows and scales, as append stores them. Returns the index of the
  // first row with a NaN or infinity, or -1.
  int64_t (*quantize)(const float* x, int64_t n_rows, int64_t head_dim, Format format, std::byte* rows,
                      float* scales);
  void (*dequantize)(const std::byte* rows, const float* scales, int64_t n_rows, int64_t head_dim, Format format,
                     float* out);
};

// All entries of this build, best first. At least the scalar one is supported everywhere.
std::span<const Entry> entries();
// The entry called `name`, or the best supported one when it is empty; null if unknown or not supported here.
const Entry* find_entry(std::string_view name);

}  // namespace pagedkv::kernels
