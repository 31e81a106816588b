// Block tensors outside a cache, and what a plan lets a caller see: faults, dense rows, views that stay.

#include "pagedkv/block_arrays.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "pagedkv/cache.h"
#include "pagedkv/scratch.h"

namespace pagedkv {
namespace {

constexpr int64_t kHeads = 2, kDim = 64, kBlock = 16;

std::vector<float> random_rows(int64_t n, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(n * kHeads * kDim));
  for (float& value : x) value = normal(generator);
  return x;
}

std::unique_ptr<Cache> make_cache(Format format, int64_t num_blocks = 64) {
  auto cache =
      Cache::create({.groups = {{.shape = {kHeads, kDim, kDim, {format, format}}, .layers = {0}}},
                     .num_blocks = Blocks(num_blocks),
                     .kv_memory = Bytes(int64_t{256} << 20),
                     .prefix_sharing = false,
                     .q_heads_per_kv_head = 2});  // as the tables' reader knows: CPUs without VNNI choose by it
  return std::move(cache).value();
}

StepPlan reserve(Cache& cache, SequenceId id, int64_t n) {
  const StepRequest request{.sequence = id, .tokens = {}, .n_tokens = Tokens(n)};
  return std::move(cache.reserve({&request, 1})).value();
}

// The same rows in a cache, read as a cache and as block tensors by table.
TEST(BlockArrays, ReadByTablesTheTensorsOfACacheGiveItsBits) {
  for (const Format format : kAllFormats) {
    SCOPED_TRACE(format_name(format));
    const auto cache = make_cache(format);
    const SequenceId id = cache->start({})->id;
    StepPlan plan = reserve(*cache, id, 600);
    const auto k = random_rows(600, 1), v = random_rows(600, 2);
    ASSERT_TRUE(cache->append(plan, 0, {.data = k.data()}, {.data = v.data()}).ok());
    ASSERT_TRUE(cache->commit(std::move(plan)).ok());
    const ReadRequest read{id, Tokens(3)};
    const auto reading = cache->plan_read({&read, 1});
    ASSERT_TRUE(reading.ok());
    const auto q = random_rows(6, 3);
    std::vector<float> expected(3 * 4 * kDim), expected_lse(12), out(expected.size()), lse(12);
    Scratch scratch, own;
    const AttendArgs args{.plan = *reading,
                          .num_q_heads = 4,
                          .q = q.data(),
                          .out = expected.data(),
                          .lse = expected_lse.data(),
                          .scratch = *scratch.get(cache->scratch_bytes(*reading, 1, 4))};
    ASSERT_TRUE(cache->attend(args).ok());
    ASSERT_TRUE(cache->merge(args).ok());

    const GroupPlan group = reading->group(0);
    const BlockArrays arrays{*cache->tensors(0), cache->options().groups[0].shape};
    const auto attention = BlockAttention::plan(arrays,
                                                {.n_sequences = 1,
                                                 .max_blocks = group.max_blocks,
                                                 .block_tables = group.block_tables.data(),
                                                 .seq_lens = reading->seq_lens().data(),
                                                 .query_start_loc = reading->query_start_loc().data()},
                                                {.num_q_heads = 4});
    ASSERT_TRUE(attention.ok()) << attention.status().message();
    for (const int parts : {1, 3}) {
      const BlockAttention::Args call{.q = q.data(),
                                      .out = out.data(),
                                      .lse = lse.data(),
                                      .scratch = *own.get(attention->scratch_bytes(parts))};
      for (int part = 0; part < parts; ++part) ASSERT_TRUE(attention->attend(call, {part, parts}).ok());
      ASSERT_TRUE(attention->merge(call).ok());
      EXPECT_EQ(out, expected);
      EXPECT_EQ(lse, expected_lse);
    }
  }
}

struct OwnPool {
  std::vector<float> k = std::vector<float>(size_t(4 * kBlock * kHeads * kDim), NAN);
  std::vector<float> v = k;
  BlockArrays arrays() {
    const auto view = [](std::vector<float>& data) {
      TensorView view{.data = reinterpret_cast<std::byte*>(data.data()), .element_bytes = 4};
      const int64_t shape[4] = {4, kBlock, kHeads, kDim};
      int64_t stride = 4;
      for (int axis = 3; axis >= 0; --axis) {
        view.shape[axis] = shape[axis];
        view.strides[axis] = stride;
        stride *= shape[axis];
      }
      return view;
    };
    return {{.k = view(k), .v = view(v)}, {kHeads, kDim, kDim, {Format::kF32, Format::kF32}}};
  }
};

TEST(BlockArrays, RowsGoToTheirSlotsAndWhatIsRefusedWritesNothing) {  // O-MEM-11
  OwnPool pool;
  const auto rows = random_rows(3, 1);
  const KvRows in{.data = rows.data()};
  for (const int64_t bad : {int64_t{-2}, 4 * kBlock, int64_t{1} << 40}) {
    const std::vector<int64_t> slots = {0, bad, 1};
    const Status status = write_slots(pool.arrays(), in, in, slots);
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_NE(status.message().find(std::to_string(bad)), std::string::npos) << status.message();
  }
  EXPECT_TRUE(std::ranges::all_of(pool.k, [](float x) { return std::isnan(x); }));
  const std::vector<int64_t> slots = {17, -1, 3};
  ASSERT_TRUE(write_slots(pool.arrays(), in, in, slots).ok());
  EXPECT_TRUE(std::equal(rows.begin(), rows.begin() + kHeads * kDim, pool.k.begin() + 17 * kHeads * kDim));
  EXPECT_TRUE(std::equal(rows.begin() + 2 * kHeads * kDim, rows.end(), pool.v.begin() + 3 * kHeads * kDim));
  EXPECT_EQ(std::ranges::count_if(pool.k, [](float x) { return !std::isnan(x); }), 2 * kHeads * kDim);

  auto bad_rows = rows;
  bad_rows[size_t(kHeads * kDim + kDim)] = INFINITY;  // token 1, head 1
  const std::vector<int64_t> all = {0, 1, 2};
  const Status status = write_slots(pool.arrays(), {.data = bad_rows.data()}, in, all);
  EXPECT_EQ(status.code(), Code::kNotFinite);
  EXPECT_NE(status.message().find("KV head 1, token 1"), std::string::npos) << status.message();
}

TEST(BlockArrays, TablesAndTensorsThatContradictThemselvesAreRefusedWithTheNumbers) {
  OwnPool pool;
  const int32_t starts[] = {0, 1}, lengths[] = {20};
  const auto refusal = [&](BlockArrays arrays, std::vector<int32_t> table, int32_t length, int64_t q_heads) {
    const int32_t own_length[] = {length};
    return BlockAttention::plan(arrays,
                                {.n_sequences = 1,
                                 .max_blocks = int64_t(table.size()),
                                 .block_tables = table.data(),
                                 .seq_lens = own_length,
                                 .query_start_loc = starts},
                                {.num_q_heads = q_heads})
        .status()
        .message();
  };
  EXPECT_EQ(refusal(pool.arrays(), {0, 3}, lengths[0], 4), "");
  EXPECT_EQ(refusal(pool.arrays(), {0, 3, 99}, lengths[0], 4), "");  // an unused place
  for (const int32_t id : {-1, 4, 2147483647})
    EXPECT_NE(refusal(pool.arrays(), {0, id}, 20, 4).find(std::to_string(id)), std::string::npos);
  EXPECT_NE(refusal(pool.arrays(), {0, 3}, 33, 4).find("3 blocks"), std::string::npos);
  EXPECT_NE(refusal(pool.arrays(), {0, 3}, -1, 4).find("-1 tokens"), std::string::npos);
  EXPECT_NE(refusal(pool.arrays(), {0, 3}, 20, 3).find("3 query heads"), std::string::npos);
  auto narrow = pool.arrays();
  narrow.tensors.v.shape[3] = 32;
  EXPECT_NE(refusal(narrow, {0, 3}, 20, 4).find("values"), std::string::npos);
  auto strided = pool.arrays();
  strided.tensors.k.strides[3] = 8;
  EXPECT_NE(refusal(strided, {0, 3}, 20, 4).find("contiguous"), std::string::npos);
  auto unscaled = pool.arrays();
  unscaled.shape.formats.k = Format::kQ8;
  EXPECT_NE(refusal(unscaled, {0, 3}, 20, 4).find("keys"), std::string::npos);
}

TEST(Cache, FaultsTellBeforeCommitWhatItWouldReject) {  // O-SHARE-14
  const auto cache = make_cache(Format::kQ8);
  const SequenceId a = cache->start({})->id, b = cache->start({})->id;
  const StepRequest requests[] = {{.sequence = a, .tokens = {}, .n_tokens = Tokens(2)},
                                  {.sequence = b, .tokens = {}, .n_tokens = Tokens(2)}};
  StepPlan plan = std::move(cache->reserve(requests)).value();
  auto rows = random_rows(4, 1);
  rows[size_t(3 * kHeads * kDim)] = NAN;
  ASSERT_TRUE(cache->append(plan, 0, {.data = rows.data()}, {.data = rows.data()}).ok());
  const auto faults = cache->faults(plan);
  ASSERT_TRUE(faults.ok());
  EXPECT_TRUE((*faults)[0].ok());
  EXPECT_EQ((*faults)[1].code(), Code::kNotFinite);
  plan.abandon();
  EXPECT_EQ(cache->length(a)->n, 0);
  EXPECT_EQ(cache->faults(plan).status().code(), Code::kInvalidArgument);
  EXPECT_TRUE(cache->verify().ok());
}

TEST(Cache, DenseRowsOfAPlanComeFromAnyPositionOnAndIncludeItsOwn) {
  for (const ArenaOrder arena : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor}) {
    auto made =
        Cache::create({.groups = {{.shape = {kHeads, kDim, kDim, {Format::kQ8, Format::kF16}}, .layers = {0}}},
                       .num_blocks = Blocks(16),
                       .arena = arena});
    Cache& cache = **made;
    const SequenceId id = cache.start({})->id;
    StepPlan first = reserve(cache, id, 20);
    const auto rows = random_rows(20, 1);
    ASSERT_TRUE(cache.append(first, 0, {.data = rows.data()}, {.data = rows.data()}).ok());
    ASSERT_TRUE(cache.commit(std::move(first)).ok());
    StepPlan plan = reserve(cache, id, 5);
    const auto more = random_rows(5, 2);
    ASSERT_TRUE(cache.append(plan, 0, {.data = more.data()}, {.data = more.data()}).ok());
    std::vector<float> k(size_t(22 * kHeads * kDim)), v(k.size());
    const auto target = [](std::vector<float>& to) {  // head-major
      return Cache::DenseRows{.data = to.data(), .token_stride = kDim, .head_stride = 22 * kDim};
    };
    ASSERT_TRUE(cache.read_dense(plan, 0, 0, Tokens(3), target(k), target(v)).ok());
    ASSERT_TRUE(cache.commit(std::move(plan)).ok());
    const auto whole = cache.read_dense(id, 0);
    ASSERT_TRUE(whole.ok());
    for (int64_t p = 3; p < 25; ++p)
      for (int64_t h = 0; h < kHeads; ++h)
        for (int64_t i = 0; i < kDim; ++i) {
          ASSERT_EQ(k[size_t((h * 22 + p - 3) * kDim + i)], whole->k[size_t((p * kHeads + h) * kDim + i)]);
          ASSERT_EQ(v[size_t((h * 22 + p - 3) * kDim + i)], whole->v[size_t((p * kHeads + h) * kDim + i)]);
        }
    const ReadRequest read{id, Tokens(1)};
    const auto reading = cache.plan_read({&read, 1});
    EXPECT_EQ(cache.read_dense(*reading, 1, 0, Tokens(0), target(k), target(v)).code(), Code::kInvalidArgument);
    EXPECT_EQ(cache.read_dense(*reading, 0, 0, Tokens(26), target(k), target(v)).code(), Code::kInvalidArgument);
    EXPECT_EQ(cache.read_dense(*reading, 0, 7, Tokens(0), target(k), target(v)).code(), Code::kInvalidArgument);
  }
}

TEST(Cache, WhatIsKeptCommittedCanBeReadAfterThePoolWouldHaveShrunk) {
  const auto cache = make_cache(Format::kF32, 16);
  const SequenceId id = cache->start({})->id;
  StepPlan plan = reserve(*cache, id, 4000);
  plan.abandon();
  StepPlan again = reserve(*cache, id, 4000);
  const auto kept = cache->keep_committed(0);
  ASSERT_TRUE(kept.ok());
  again.abandon();
  ASSERT_TRUE(cache->release(id).ok());
  const TensorView k = cache->tensors(0)->k;
  float sum = 0;
  for (int64_t block = 0; block < kept->n; ++block) sum += *reinterpret_cast<float*>(k.data + block * k.strides[0]);
  EXPECT_EQ(sum, 0);
  EXPECT_GE(cache->stats().blocks_total, kept->n);
  EXPECT_EQ(cache->keep_committed(1).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace pagedkv
