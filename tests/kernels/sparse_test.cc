// Places whose element index passes 2^31 and whose byte offset passes 2^32. Memory is mapped, hardly any is
// touched.
#include <sys/mman.h>

#include "tests/kernels/paged_world.h"

namespace pagedkv {
namespace {

TEST(Sparse, BlocksPastTwoToThe31ElementsHoldTheirOwnRows) {  // O-NUM-07
  constexpr int64_t kHeads = 32, kD = 128, kBlockSize = 16, kBlocks = 32770;
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    const int64_t row = row_bytes(format, kD).n, rows = kBlocks * kBlockSize * kHeads;
    const size_t bytes = size_t(rows * (2 * row + 8));
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for " << bytes << " bytes";
    auto* base = static_cast<std::byte*>(memory);
    kernels::LayerStore layer{
        .k = {}, .v = {}, .block_size = kBlockSize, .num_kv_heads = kHeads, .num_blocks = kBlocks};
    for (kernels::RowStore* store : {&layer.k, &layer.v}) {
      const int64_t side = store == &layer.v;
      *store = {.rows = base + side * rows * row,
                .block_stride = kBlockSize * kHeads * row,
                .slot_stride = row,
                .head_stride = kBlockSize * row,
                .scales = is_quantized(format) ? base + 2 * rows * row + side * rows * 4 : nullptr,
                .scale_block_stride = kBlockSize * kHeads * 4,
                .scale_slot_stride = 4,
                .scale_head_stride = kBlockSize * 4,
                .format = format,
                .head_dim = kD};
    }
    // One token in the last slot of each of three blocks.
    const int64_t blocks[] = {32767, 32768, 32769};
    std::vector<int64_t> slots;
    std::vector<float> values;
    for (int64_t block : blocks) {
      slots.push_back(block * kBlockSize);
      values.insert(values.end(), size_t(kHeads * kD), float(block - 32760));
    }
    const std::vector<int32_t> starts = {0, 1, 2, 3}, lens = {1, 1, 1}, table = {32767, 32768, 32769};
    std::vector<uint64_t> faults(3, kernels::kNoFault);
    kernels::AppendCounters counters;
    const kernels::Batch batch{.n_sequences = 3,
                               .n_tokens = 3,
                               .max_blocks = 1,
                               .block_tables = table.data(),
                               .seq_lens = lens.data(),
                               .query_start_loc = starts.data(),
                               .slot_mapping = slots.data()};
    const KvRows input{values.data(), ElementType::kF32, kHeads * kD, kD};
    entry.append(
        {.layer = layer, .batch = batch, .k = input, .v = input, .faults = faults.data(), .counters = &counters},
        {});

    kernels::Work work;
    const kernels::AttendShape shape{.num_q_heads = kHeads};
    plan_work(batch, 0, kHeads, work);
    const int64_t scratch_bytes = entry.part_scratch_bytes(layer, shape);
    std::vector<std::byte> scratch(size_t(scratch_bytes + 64));
    std::vector<float> out(values.size(), kNan);
    entry.attend({.layer = layer,
                  .batch = batch,
                  .shape = shape,
                  .items = work.items.data(),
                  .n_items = int64_t(work.items.size()),
                  .total_cost = work.total_cost,
                  .q = values.data(),
                  .q_token_stride = kHeads * kD,
                  .out = out.data(),
                  .part_scratch = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64),
                  .part_scratch_bytes = scratch_bytes},
                 {});
    for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], values[i], 1e-5f * values[i]) << i;
    for (int64_t i = 0; i < kBlockSize * kHeads * row; ++i) ASSERT_EQ(base[i], std::byte(0)) << "block 0";
    munmap(memory, bytes);
  });
}

}  // namespace
}  // namespace pagedkv
