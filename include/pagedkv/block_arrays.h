// Append and attention over block tensors that are not a Cache's: an engine's own pool, read by its own tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "pagedkv/attention.h"
#include "pagedkv/export.h"
#include "pagedkv/layout.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

// One layer's block tensors in somebody else's memory, with any strides; the last dimension is contiguous. `shape`
// says what their bytes mean: widths and element sizes must agree with its formats.
struct BlockArrays {
  LayerTensors tensors;
  LayerShape shape;
};

// Which blocks hold which sequences. Names and shapes are vLLM's.
struct BlockTables {
  int64_t n_sequences = 0;
  int64_t max_blocks = 0;                    // width of a table row
  const int32_t* block_tables = nullptr;     // [n_sequences, max_blocks]; entries past a sequence's end are ignored
  const int32_t* seq_lens = nullptr;         // [n_sequences] tokens stored, those of the queries included
  const int32_t* query_start_loc = nullptr;  // [n_sequences + 1], from 0: which query rows are whose
};

// Writes rows of K and V into their slots, quantizing where the formats do (vLLM's reshape_and_cache).
//   k, v          [n_tokens, num_kv_heads, head_dim], last dimension contiguous
//   slot_mapping  [n_tokens] block * block_size + offset; -1 skips the token
// Errors: kInvalidArgument (tensors, a slot that is not there: nothing is written), kNotFinite with head and token:
// that row is not written, the others are.
PKV_API Status write_slots(const BlockArrays& arrays, const KvRows& k, const KvRows& v,
                           std::span<const int64_t> slot_mapping);

struct BlockAttentionOptions {
  int64_t num_q_heads = 0;     // a multiple of the KV heads; 0: equal to them
  int64_t sliding_window = 0;  // keys a query sees, its own position included; 0: all
  QueryPath query_path = QueryPath::kAuto;
  std::string isa;  // kernel entry by name; empty: as for a Cache
};

// One attention call over such tensors, planned once and run by any number of parts. Bits are those of a Cache that
// stores the same rows. The arrays and tables must outlive it. Const members any thread: the parts of one
// call share its scratch, another call has one of its own.
class PKV_API BlockAttention {
 public:
  // Errors: kInvalidArgument: tensors that contradict their formats, lengths, rows or a block id out of range (with
  // sequence and place), head counts.
  static Result<BlockAttention> plan(const BlockArrays& arrays, const BlockTables& tables,
                                     const BlockAttentionOptions& options);
  BlockAttention(BlockAttention&&) noexcept;
  ~BlockAttention();

  struct Args {
    const float* q = nullptr;  // [n_tokens, num_q_heads, head_dim_k], dense
    float* out = nullptr;      // [n_tokens, num_q_heads, head_dim_v], dense
    float* lse = nullptr;      // [n_tokens, num_q_heads], natural; may be null
    float scale = 0;           // 0: 1/sqrt(head_dim_k)
    float softcap = 0;         // 0: off
    const float* sinks = nullptr;
    std::span<std::byte> scratch;  // scratch_bytes(n_parts), 64-byte aligned
  };
  Bytes scratch_bytes(int n_parts) const;
  // All parts of attend come before all parts of merge.
  Status attend(const Args& args, Part part = {}) const;
  Status merge(const Args& args, Part part = {}) const;

 private:
  struct Impl;
  explicit BlockAttention(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace pagedkv
