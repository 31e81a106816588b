// append: which bytes go where, from which input, and what is reported.
#include "tests/kernels/paged_world.h"

namespace pagedkv {
namespace {

// One layer in head-major blocks of `block_size`, K and V alike, filled with 0xee.
struct Store {
  static constexpr int64_t kBlocks = 4, kBlockSize = 4;
  Store(Format format, int64_t heads, int64_t d) : n_heads(heads), row(row_bytes(format, d).n) {
    const size_t rows = size_t(kBlocks * kBlockSize * heads);
    bytes.resize(2 * rows * size_t(row), std::byte(0xee));
    scales.resize(2 * rows, -5.0f);
    for (kernels::RowStore* store : {&layer.k, &layer.v}) {
      const size_t side = store == &layer.v ? rows : 0;
      *store = {.rows = bytes.data() + side * size_t(row),
                .block_stride = kBlockSize * heads * row,
                .slot_stride = row,
                .head_stride = kBlockSize * row,
                .scales = is_quantized(format) ? reinterpret_cast<std::byte*>(scales.data() + side) : nullptr,
                .scale_block_stride = kBlockSize * heads * 4,
                .scale_slot_stride = 4,
                .scale_head_stride = kBlockSize * 4,
                .format = format,
                .head_dim = d};
    }
    layer.block_size = kBlockSize;
    layer.num_kv_heads = heads;
    layer.num_blocks = kBlocks;
  }
  int64_t n_heads, row;
  std::vector<std::byte> bytes;
  std::vector<float> scales;
  kernels::LayerStore layer;
};

struct Append {
  std::vector<int64_t> slots;
  std::vector<int32_t> starts;
  std::vector<uint64_t> faults;
  kernels::AppendCounters counters;

  explicit Append(std::vector<int64_t> slot_mapping, std::vector<int32_t> query_start_loc = {})
      : slots(std::move(slot_mapping)), starts(std::move(query_start_loc)) {
    if (starts.empty()) starts = {0, int32_t(slots.size())};
    faults.assign(starts.size() - 1, kernels::kNoFault);
  }
  kernels::AppendCall call(Store& store, const KvRows& k, const KvRows& v) {
    return {.layer = store.layer,
            .batch = {.n_sequences = int64_t(faults.size()),
                      .n_tokens = int64_t(slots.size()),
                      .query_start_loc = starts.data(),
                      .slot_mapping = slots.data()},
            .k = k,
            .v = v,
            .layer_index = 5,
            .faults = faults.data(),
            .counters = &counters};
  }
  void run(const kernels::Entry& entry, Store& store, const KvRows& k, const KvRows& v, int parts = 1) {
    for (int i = 0; i < parts; ++i) entry.append(call(store, k, v), {i, parts});
  }
  void run_on_threads(const kernels::Entry& entry, Store& store, const KvRows& k, const KvRows& v, int parts) {
    const kernels::AppendCall shared = call(store, k, v);
    std::vector<std::thread> threads;
    for (int i = 0; i < parts; ++i) threads.emplace_back([&, i] { entry.append(shared, {i, parts}); });
    for (std::thread& thread : threads) thread.join();
  }
};

std::vector<float> gaussian(size_t n, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> gauss;
  std::vector<float> x(n);
  for (float& v : x) v = gauss(random);
  return x;
}

TEST(Append, WritesEachRowIntoItsSlotAndNothingElse) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    const int64_t heads = 3, d = 20;
    const std::vector<int64_t> slots = {6, 15, 0, 9};
    // Strided input: tokens 100 apart, heads 25 apart.
    const std::vector<float> k = gaussian(4 * 100, 1), v = gaussian(4 * 100, 2);
    Store store(format, heads, d);
    Append append(slots);
    append.run(entry, store, {k.data(), ElementType::kF32, 100, 25}, {v.data(), ElementType::kF32, 100, 25}, 3);
    Store expected(format, heads, d);
    for (size_t t = 0; t < slots.size(); ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        for (const auto& [input, side] : {std::pair(&k, &expected.layer.k), std::pair(&v, &expected.layer.v)}) {
          const auto first = input->begin() + int64_t(t) * 100 + h * 25;
          const NaiveRow row = naive_encode({first, first + d}, format);
          const int64_t block = slots[t] / 4, slot = slots[t] % 4;
          std::memcpy(side->rows + block * side->block_stride + slot * side->slot_stride + h * side->head_stride,
                      row.bytes.data(), row.bytes.size());
          if (side->scales != nullptr) {
            std::memcpy(side->scales + block * side->scale_block_stride + slot * 4 + h * side->scale_head_stride,
                        &row.scale, 4);
          }
        }
      }
    }
    EXPECT_EQ(store.bytes, expected.bytes);
    EXPECT_EQ(store.scales, expected.scales);
  });
}

TEST(Append, PartsOnThreadsWriteReportAndCountAsOneDoes) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    const int64_t heads = 3, d = 20;
    std::vector<float> x = gaussian(size_t(16 * heads * d), 6);
    std::fill_n(x.begin(), d, 1e-9f);  // token 0, head 0: on the floor
    x[size_t(2 * heads * d)] = 1e30f;  // token 2: saturates halves
    for (size_t token : {5, 6, 11}) x[token * size_t(heads * d) + 3] = kNan;
    const KvRows rows{x.data(), ElementType::kF32, heads * d, d};
    std::vector<int64_t> slots(16);
    std::iota(slots.begin(), slots.end(), 0);
    Store alone(format, heads, d), shared(format, heads, d);
    Append one(slots, {0, 7, 16}), many(slots, {0, 7, 16});
    one.run(entry, alone, rows, rows);
    many.run_on_threads(entry, shared, rows, rows, 4);
    EXPECT_EQ(shared.bytes, alone.bytes);
    EXPECT_EQ(shared.scales, alone.scales);
    EXPECT_EQ(many.faults, one.faults);
    EXPECT_EQ(many.counters.floor_clamped_rows, one.counters.floor_clamped_rows);
    EXPECT_EQ(many.counters.saturated_values, one.counters.saturated_values);
  });
}

TEST(Append, HalfInputStoresTheSameBytesAsItsFloats) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (ElementType type : {ElementType::kF16, ElementType::kBF16}) {
      const int64_t d = 36;
      std::vector<float> x = gaussian(size_t(2 * 2 * d), 3);
      std::vector<uint16_t> halves;
      for (float& value : x) {
        halves.push_back(type == ElementType::kF16 ? f32_to_f16(value) : f32_to_bf16(value));
        value = type == ElementType::kF16 ? f16_to_f32(halves.back()) : bf16_to_f32(halves.back());
      }
      Store from_half(format, 2, d), from_float(format, 2, d);
      Append a({1, 2}), b({1, 2});
      a.run(entry, from_half, {halves.data(), type, 2 * d, d}, {halves.data(), type, 2 * d, d});
      b.run(entry, from_float, {x.data(), ElementType::kF32, 2 * d, d}, {x.data(), ElementType::kF32, 2 * d, d});
      EXPECT_EQ(from_half.bytes, from_float.bytes);
      EXPECT_EQ(from_half.scales, from_float.scales);
    }
  });
}

TEST(Append, SkipsSlotsThatAreNegativeOrOutsideThePool) {  // O-MEM-11
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    const std::vector<float> x = gaussian(3 * 8, 4);
    Store store(format, 1, 8);
    const Store untouched = store;
    Append append({-1, 16, int64_t{1} << 40});
    append.run(entry, store, {x.data(), ElementType::kF32, 8, 8}, {x.data(), ElementType::kF32, 8, 8});
    EXPECT_EQ(store.bytes, untouched.bytes);
    EXPECT_EQ(store.scales, untouched.scales);
  });
}

TEST(Append, ARowWithNanOrInfinityIsReportedAndNotWritten) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (float bad : {kNan, kInfinity, -kInfinity}) {
      const int64_t d = 20;
      std::vector<float> k = gaussian(size_t(5 * 2 * d), 5), v = k;
      k[size_t((3 * 2 + 1) * d + 19)] = bad;  // token 3, head 1
      v[size_t((4 * 2 + 0) * d + 7)] = bad;   // token 4, head 0
      Store store(format, 2, d);
      Append append({0, 1, 2, 3, 4}, {0, 2, 2, 5});
      append.run(entry, store, {k.data(), ElementType::kF32, 2 * d, d}, {v.data(), ElementType::kF32, 2 * d, d}, 2);
      EXPECT_EQ(append.faults[0], kernels::kNoFault);
      EXPECT_EQ(append.faults[1], kernels::kNoFault);
      EXPECT_EQ(append.faults[2], uint64_t{5} << 48 | uint64_t{0} << 32 | 4u);  // head 0 comes before head 1
      EXPECT_EQ(*(store.layer.k.rows + 3 * store.row + store.layer.k.head_stride), std::byte(0xee));
      EXPECT_NE(*(store.layer.v.rows + 3 * store.row + store.layer.v.head_stride), std::byte(0xee));
    }
  });
}

TEST(Append, HalfInputWithNanOrInfinityIsReportedToo) {
  for_each_entry([](const kernels::Entry& entry) {
    for (uint16_t bad : {0x7c00, 0xfc00, 0x7e01, 0xfe00}) {
      std::vector<uint16_t> x(8, 0x3c00);
      x[5] = bad;
      Store store(Format::kF16, 1, 8);
      Append append({0});
      append.run(entry, store, {x.data(), ElementType::kF16, 8, 8}, {x.data(), ElementType::kF16, 8, 8});
      EXPECT_NE(append.faults[0], kernels::kNoFault) << bad;
    }
  });
}

TEST(Append, CountsRowsOnTheFloorAndSaturatedValues) {
  for_each_entry([](const kernels::Entry& entry) {
    const std::vector<float> zero(20, 0.0f), tiny(20, 1e-9f);
    std::vector<float> big(20, 1.0f);
    big[3] = 65504.0f;  // fits
    big[4] = 65505.0f;
    big[19] = -1e30f;
    const auto count = [&](Format format, const std::vector<float>& k, const std::vector<float>& v) {
      Store store(format, 1, 20);
      Append append({0});
      append.run(entry, store, {k.data(), ElementType::kF32, 20, 20}, {v.data(), ElementType::kF32, 20, 20});
      return append.counters;
    };
    EXPECT_EQ(count(Format::kQ8, zero, tiny).floor_clamped_rows, 1);  // a row of zeros loses nothing
    EXPECT_EQ(count(Format::kQ4, tiny, tiny).floor_clamped_rows, 2);
    EXPECT_EQ(count(Format::kF16, tiny, tiny).floor_clamped_rows, 0);
    EXPECT_EQ(count(Format::kF16, big, zero).saturated_values, 2);
    EXPECT_EQ(count(Format::kBF16, big, big).saturated_values, 0);
    EXPECT_EQ(count(Format::kBF16, std::vector<float>(20, 3.4e38f), zero).saturated_values, 20);
  });
}

}  // namespace
}  // namespace pagedkv
