// plan_work, merge_states, and the table of entries.
#include <map>

#include "tests/kernels/paged_world.h"

namespace pagedkv {
namespace {

struct Plan {
  std::vector<int32_t> lens, starts = {0};
  kernels::Work work;

  // {length, new tokens} by sequence
  Plan(const std::vector<std::pair<int, int>>& sequences, int64_t window, int64_t kv_heads = 2) {
    for (const auto& [length, n_new] : sequences) {
      lens.push_back(length);
      starts.push_back(starts.back() + n_new);
    }
    const kernels::Batch batch{.n_sequences = int64_t(lens.size()),
                               .n_tokens = starts.back(),
                               .seq_lens = lens.data(),
                               .query_start_loc = starts.data()};
    plan_work(batch, window, kv_heads, work);
  }
};

TEST(PlanWork, EveryRowIsInOneItemOrInOneOfEveryRun) {
  for (int64_t window : {0, 1, 100, 300, 5000}) {
    const Plan plan({{1, 1}, {0, 0}, {2000, 1}, {700, 700}, {256, 8}, {257, 8}, {3, 9}, {5000, 9}}, window);
    std::map<std::pair<int32_t, int32_t>, int> seen;  // (row, run or -1) -> items
    int64_t cost = 0, partials = 0;
    for (const kernels::WorkItem& item : plan.work.items) {
      EXPECT_EQ(item.cost_before, cost);
      EXPECT_GT(item.cost, 0);
      cost += item.cost * 2;
      EXPECT_GE(item.row_begin, plan.starts[size_t(item.sequence)]);
      EXPECT_LE(item.row_end, plan.starts[size_t(item.sequence) + 1]);
      EXPECT_LE(item.row_end - item.row_begin, kernels::kRowTile);
      if (item.partial >= 0) {
        EXPECT_EQ(item.partial, partials);
        EXPECT_EQ(item.run_end, item.run_begin + 1);
        partials += item.row_end - item.row_begin;
      }
      for (int32_t row = item.row_begin; row < item.row_end; ++row) {
        EXPECT_EQ(seen[std::pair(row, item.partial >= 0 ? item.run_begin : -1)]++, 0);
      }
    }
    EXPECT_EQ(cost, plan.work.total_cost);
    EXPECT_EQ(partials, plan.work.partial_rows);
    for (int32_t row = 0; row < plan.starts.back(); ++row) {
      const bool split = std::any_of(
          plan.work.merges.begin(), plan.work.merges.end(),
          [&](const kernels::MergeItem& merge) { return row >= merge.row_begin && row < merge.row_end; });
      EXPECT_EQ(seen.count(std::pair(row, -1)), split ? 0u : 1u);
    }
    for (const kernels::MergeItem& merge : plan.work.merges) {
      EXPECT_GT(merge.run_end - merge.run_begin, 1);
      for (int32_t run = merge.run_begin; run < merge.run_end; ++run) {
        EXPECT_EQ(seen.count(std::pair(merge.row_begin, run)), 1u);
      }
    }
  }
}

TEST(PlanWork, RunsBehindTheWindowAreNotVisited) {
  const Plan plan({{10000, 1}}, 300);
  ASSERT_EQ(plan.work.items.size(), 3u);  // keys 9700 to 9999
  EXPECT_EQ(plan.work.items[0].run_begin, 9700 / 256);
  EXPECT_EQ(plan.work.items[2].run_begin, 9999 / 256);
}

// Units of an item and a KV head go to the part in whose share of the cost their middle lies (attend).
double largest_part_over_mean(const Plan& plan, int64_t kv_heads, int parts) {
  std::vector<int64_t> costs(size_t(parts), 0);
  for (const kernels::WorkItem& item : plan.work.items) {
    for (int64_t head = 0; head < kv_heads; ++head) {
      const int64_t twice_middle = 2 * (item.cost_before + item.cost * head) + item.cost;
      int part = 0;
      while (2 * (plan.work.total_cost * (part + 1) / parts) <= twice_middle) ++part;
      costs[size_t(part)] += item.cost;
    }
  }
  const int64_t largest = *std::max_element(costs.begin(), costs.end());
  return double(largest) * parts / double(plan.work.total_cost);
}

TEST(PlanWork, PartsAreEvenWithinATenthForOneLongSequenceAndForManyShortOnes) {
  struct Shape {
    int64_t sequences, tokens, heads_kv;
  };
  for (const Shape& shape :
       {Shape{1, 32768, 8}, {8, 4096, 32}, {64, 512, 8}, {1, 8192, 3}, {1, 8192, 1}, {64, 512, 1}, {1, 32768, 4}}) {
    const Plan plan(std::vector<std::pair<int, int>>(size_t(shape.sequences), {int(shape.tokens), 1}), 0,
                    shape.heads_kv);
    for (const int parts : {2, 3, 7}) {
      EXPECT_LE(largest_part_over_mean(plan, shape.heads_kv, parts), 1.10)
          << shape.sequences << " x " << shape.tokens << ", " << shape.heads_kv << " KV heads, " << parts
          << " parts";
    }
  }
}

TEST(PlanWork, OneTokenMoreDoesNotMakeTwoPartsUneven) {
  for (const int tokens : {512, 513, 514, 1024, 1025, 2048, 2049}) {
    const Plan plan({{tokens, 1}}, 0, 3);
    EXPECT_LE(largest_part_over_mean(plan, 3, 2), 1.05) << tokens;
  }
}

TEST(PlanWork, ALongSequenceIsOneItemARun) {
  const Plan plan(std::vector<std::pair<int, int>>(256, {8192, 1}), 0, 8);
  EXPECT_EQ(plan.work.items.size(), 256u * 32);
}

TEST(MergeStates, TwoHalvesMakeTheWhole) {
  World w({.entry = *kernels::find_entry({}),
           .format_k = Format::kF32,
           .format_v = Format::kF32,
           .group = 3,
           .lengths = {200}});
  World first({.entry = *kernels::find_entry({}),
               .format_k = Format::kF32,
               .format_v = Format::kF32,
               .group = 3,
               .lengths = {200}});
  const Rows whole = w.attend({{0, 200, 1}});
  // Blocks 0-4 in one partial result, 5-12 in the other: the rest of the table names nothing.
  Rows halves[2];
  for (int half = 0; half < 2; ++half) {
    std::vector<int32_t> table = first.tables()[0];
    for (size_t b = 0; b < table.size(); ++b) {
      if ((b < 5) != (half == 0)) first.tables()[0][b] = -1;
    }
    halves[half] = first.attend({{0, 200, 1}});
    first.tables()[0] = table;
  }
  merge_states(halves[0].out.data(), halves[0].lse.data(), halves[1].out.data(), halves[1].lse.data(), 3, 64);
  for (size_t i = 0; i < whole.out.size(); ++i) EXPECT_NEAR(halves[0].out[i], whole.out[i], 1e-5f);
  for (size_t i = 0; i < whole.lse.size(); ++i) EXPECT_NEAR(halves[0].lse[i], whole.lse[i], 1e-5f);
}

TEST(Entries, TheBestComesFirstAndTheScalarOneRunsEverywhere) {
  ASSERT_FALSE(kernels::entries().empty());
  EXPECT_EQ(kernels::entries().back().name, "scalar");
  EXPECT_TRUE(kernels::entries().back().supported());
  EXPECT_EQ(kernels::find_entry({}), supported_entries().front());
  EXPECT_EQ(kernels::find_entry("scalar"), &kernels::entries().back());
  EXPECT_EQ(kernels::find_entry("mmx"), nullptr);
}

TEST(Entries, QuantizeTheSameBytes) {
  std::mt19937_64 random(9);
  std::normal_distribution<float> gauss;
  std::vector<float> x(200 * 96);
  for (float& v : x) v = gauss(random);
  for (Format format : kAllFormats) {
    std::vector<std::vector<std::byte>> results;
    for_each_entry([&](const kernels::Entry& entry) {
      std::vector<std::byte> bytes(size_t(200 * row_bytes(format, 96).n));
      std::vector<float> scales(200);
      EXPECT_EQ(entry.quantize(x.data(), 200, 96, format, bytes.data(), scales.data()), -1);
      const auto* first = reinterpret_cast<const std::byte*>(scales.data());
      bytes.insert(bytes.end(), first, first + 800);
      results.push_back(bytes);
      EXPECT_EQ(results.back(), results.front());
    });
  }
}

}  // namespace
}  // namespace pagedkv
