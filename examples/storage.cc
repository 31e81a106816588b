// What is stored: formats and their bytes, a cache with window layers, and its bytes as tensors.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pagedkv/cache.h"

using pagedkv::ArenaOrder;
using pagedkv::Blocks;
using pagedkv::Bytes;
using pagedkv::Cache;
using pagedkv::Code;
using pagedkv::Format;
using pagedkv::GroupPlan;
using pagedkv::GroupSpec;
using pagedkv::LayerShape;
using pagedkv::ReadRequest;
using pagedkv::Result;
using pagedkv::SequenceId;
using pagedkv::Status;
using pagedkv::StepRequest;
using pagedkv::TensorView;
using pagedkv::Tokens;

namespace {

constexpr int64_t kKvHeads = 2, kHeadDim = 64, kBlockSize = 16, kTokens = 200, kChunk = 40, kWindow = 64;
constexpr int kLayers = 4;

int failures = 0;

void expect(bool claim, const char* what) {
  if (claim) return;
  std::fprintf(stderr, "not so: %s\n", what);
  ++failures;
}

void sizes() {
  for (const char* mode : {"f32", "off", "q8", "q8:q4", "q4"}) {
    const auto formats = pagedkv::parse_kv_quant(mode);  // "MODE" for both, or "K:V"
    if (!formats.ok()) return expect(false, formats.status().message().c_str());
    const LayerShape layer{.num_kv_heads = 3, .head_dim_k = 64, .head_dim_v = 64, .formats = *formats};
    const Bytes bytes = pagedkv::bytes_per_token(layer) * 30;  // 30 layers
    std::printf("%-6s %6lld bytes a token\n", mode, static_cast<long long>(bytes.n));
    if (*formats == pagedkv::KvQuantConfig{Format::kQ8, Format::kQ4})
      expect(bytes == Bytes(30 * 3 * ((64 + 4) + (32 + 4))), "rows and one f32 scale each");
  }
}

// Three layers of four see the last 64 positions alone, the last layer sees all: two groups.
Result<std::unique_ptr<Cache>> make_cache(ArenaOrder arena) {
  const LayerShape shape{.num_kv_heads = kKvHeads,
                         .head_dim_k = kHeadDim,
                         .head_dim_v = kHeadDim,
                         .formats = {.k = Format::kQ8, .v = Format::kF16}};
  const GroupSpec all{.shape = shape, .layers = {3}};
  const GroupSpec window{.shape = shape, .sliding_window = kWindow, .layers = {0, 1, 2}};
  return Cache::create({.groups = {all, window},
                        .block_size = Tokens(kBlockSize),
                        .num_blocks = Blocks(32),         // there from the start: 512 tokens
                        .kv_memory = Bytes(64 << 20),     // grows up to 64 MiB in all
                        .max_context = Tokens(8192),      // longest sequence
                        .longest_chunk = Tokens(kChunk),  // most new tokens of one sequence in a step
                        .max_sequences = 4,               // at once
                        .arena = arena,                   // block_major is the default
                        .fingerprint = "my model, rope 10000"});
}

// K or V of `n` tokens, any numbers.
std::vector<float> some_rows(int64_t n, float phase) {
  std::vector<float> rows(n * kKvHeads * kHeadDim);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = std::sin(phase + 0.37f * float(i));
  return rows;
}

Status store_a_chunk(Cache& cache, SequenceId sequence, float phase) {
  const StepRequest request{.sequence = sequence, .n_tokens = Tokens(kChunk)};  // rows without token ids: no keys
  auto plan = cache.reserve({&request, 1});
  if (!plan.ok()) return plan.status();
  const std::vector<float> k = some_rows(kChunk, phase), v = some_rows(kChunk, phase + 1);
  for (int layer = 0; layer < kLayers; ++layer) {
    if (Status status = cache.append(*plan, layer, {k.data()}, {v.data()}); !status.ok()) return status;
  }
  auto committed = cache.commit(std::move(*plan));
  return committed.ok() ? committed->front() : committed.status();
}

// Group 0 holds every block of the sequence, group 1 those that its window still needs.
void look_at_windows(Cache& cache, SequenceId sequence) {
  expect(cache.blocks_held(sequence, 0).value() == Blocks(13), "200 tokens are 13 blocks");
  expect(cache.blocks_held(sequence, 1).value() == Blocks(5), "positions from 128 on are 5 blocks");

  const ReadRequest last{.sequence = sequence, .n_queries = Tokens(1)};
  auto plan = cache.plan_read({&last, 1});
  expect(plan.ok(), "the last position can be read");
  if (!plan.ok()) return;
  const GroupPlan window = plan->group(1);
  expect(window.max_blocks == 13 && window.block_tables[7] == -1, "what lies behind the window has no block");
  expect(window.block_tables[8] >= 0, "what lies in it has");

  expect(cache.truncate(sequence, Tokens(199)).ok(), "one token can always be taken back");
  const Status status = cache.truncate(sequence, Tokens(100));
  expect(status.code() == Code::kInvalidArgument, "further back, the window has dropped keys");
  std::printf("%s\n", status.message().c_str());
}

// The K rows of one position in the layer that sees all, out of the cache's own memory.
void look_at_tensors(Cache& cache, SequenceId sequence, int64_t position) {
  const ReadRequest last{.sequence = sequence};
  auto plan = cache.plan_read({&last, 1});  // for its block table
  auto tensors = cache.tensors(3);          // stays valid as long as the cache
  auto dense = cache.read_dense(sequence, 3);
  if (!plan.ok() || !tensors.ok() || !dense.ok()) return expect(false, "a cache can be looked at");

  const TensorView& k = tensors->k;  // [num_blocks, block_size, num_kv_heads, 64 bytes of q8]
  const TensorView& scales = tensors->k_scales;
  const int64_t block = plan->group(0).block_tables[position / kBlockSize], slot = position % kBlockSize;
  for (int64_t head = 0; head < kKvHeads; ++head) {
    const std::byte* row = k.data + block * k.strides[0] + slot * k.strides[1] + head * k.strides[2];
    float scale = 0;
    std::memcpy(&scale,
                scales.data + block * scales.strides[0] + slot * scales.strides[1] + head * scales.strides[2], 4);
    for (int64_t i = 0; i < kHeadDim; ++i) {
      const float value = float(int8_t(row[i])) * scale;
      expect(value == dense->k[(position * kKvHeads + head) * kHeadDim + i], "the view's bytes are what is stored");
    }
  }
  expect(tensors->v.element_bytes == 2 && tensors->v_scales.data == nullptr, "f16 rows have no scales");
  expect(k.contiguous() == (cache.options().arena == ArenaOrder::kLayerMajor), "layer_major: one plain tensor");
}

}  // namespace

int main() {
  sizes();
  for (const ArenaOrder arena : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor}) {
    const auto cache = make_cache(arena);
    if (!cache.ok()) return std::fprintf(stderr, "%s\n", cache.status().message().c_str()), 1;
    const auto started = (*cache)->start({});
    if (!started.ok()) return 1;
    for (int64_t at = 0; at < kTokens; at += kChunk) {
      const Status status = store_a_chunk(**cache, started->id, float(at));
      expect(status.ok(), status.message().c_str());
    }
    look_at_windows(**cache, started->id);
    look_at_tensors(**cache, started->id, 150);
  }
  return failures == 0 ? 0 : 1;
}
