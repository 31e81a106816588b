// A promise: a row's bits depend on its query and on the stored bytes it sees, and on nothing else.
#include <thread>

#include "tests/kernels/paged_world.h"

namespace pagedkv {
namespace {

WorldSpec spec_of(const kernels::Entry& entry, Format format, std::vector<int64_t> lengths) {
  return {.entry = entry,
          .format_k = format,
          .format_v = format,
          .num_kv_heads = 2,
          .group = 3,
          .head_dim_k = 80,
          .head_dim_v = 48,
          .lengths = std::move(lengths)};
}

// The rows of one query inside a batch's result.
Rows part_of(const World& w, const Rows& all, int64_t first_row, int64_t n_rows) {
  const int64_t heads = w.q_heads(), d = w.spec().head_dim_v;
  Rows rows;
  rows.out.assign(all.out.begin() + first_row * heads * d, all.out.begin() + (first_row + n_rows) * heads * d);
  rows.lse.assign(all.lse.begin() + first_row * heads, all.lse.begin() + (first_row + n_rows) * heads);
  return rows;
}

TEST(EqualBits, ForAnyNumberOfParts) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    World w(spec_of(entry, format, {700, 90, 33}));
    const std::vector<Query> queries = {{0, 700, 1}, {1, 90, 90}, {2, 33, 6}, {0, 600, 4}};
    const Rows whole = w.attend(queries);
    for (int parts : {2, 3, 7, 64}) EXPECT_EQ(w.attend(queries, parts), whole) << parts;
  });
}

TEST(EqualBits, ForAnyChunkingOfAPrompt) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    World w(spec_of(entry, format, {330}));
    const Rows whole = w.attend({{0, 330, 330}});
    for (int64_t chunk : {1, 2, 7, 8, 9, 16, 61, 64, 100, 256, 300})
      EXPECT_EQ(w.in_chunks(0, chunk), whole) << chunk;
  });
}

TEST(EqualBits, ForAnyChunkingUnderAWindowASoftcapAndSinks) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (int64_t window : {50, 270}) {
      WorldSpec spec = spec_of(entry, format, {600});
      spec.sliding_window = window;
      spec.softcap = 4;
      spec.sinks = {0.1f, 1, 2, -3, 4, 0};
      World w(spec);
      const Rows whole = w.attend({{0, 600, 600}});
      for (int64_t chunk : {1, 8, 37, 256}) EXPECT_EQ(w.in_chunks(0, chunk, 2), whole) << chunk;
    }
  });
}

TEST(EqualBits, ForAnyNeighboursInTheBatch) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    World w(spec_of(entry, format, {520, 5, 64, 100, 257, 1, 31}));
    const std::vector<Query> queries = {{1, 5, 5},   {0, 520, 1}, {2, 64, 64}, {3, 100, 20},
                                        {4, 257, 3}, {5, 1, 1},   {6, 31, 8}};
    const Rows batch = w.attend(queries, 2);
    int64_t row = 0;
    for (const Query& query : queries) {
      EXPECT_EQ(part_of(w, batch, row, query.n_new), w.attend({query})) << "sequence " << query.sequence;
      row += query.n_new;
    }
  });
}

TEST(EqualBits, ForAnyBlockOrderBlockSizeAndArena) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    const std::vector<Query> queries = {{0, 530, 1}, {0, 400, 40}, {0, 300, 4}};
    const auto values = [](int64_t salt) {
      return [salt](int64_t, int64_t t, int64_t h, int64_t c) {
        return std::sin(float(t * 31 + h * 17 + c * 7 + salt * 1000));
      };
    };
    std::vector<Rows> results;
    for (uint64_t seed : {1, 2}) {  // shuffles the table
      for (int64_t block_size : {1, 16, 48, 256}) {
        for (ArenaOrder order : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor}) {
          WorldSpec spec = spec_of(entry, format, {530});
          spec.block_size = block_size;
          spec.order = order;
          spec.seed = seed;
          spec.q = values(1), spec.k = values(2), spec.v = values(3);
          World w(spec);
          results.push_back(w.attend(queries));
          EXPECT_EQ(results.back(), results.front()) << "block size " << block_size << " seed " << seed;
        }
      }
    }
  });
}

TEST(EqualBits, WhateverLiesInUnusedSlots) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    const std::vector<Query> queries = {{0, 261, 1}, {1, 70, 70}, {0, 200, 3}, {1, 5, 20}};
    std::vector<Rows> results;
    for (float poison : {0.0f, 1e4f, kNan, kInfinity, -kInfinity}) {
      WorldSpec spec = spec_of(entry, format, {261, 70});
      spec.poison = poison;
      World w(spec);
      results.push_back(w.attend(queries, 2));
      EXPECT_EQ(results.back(), results.front()) << poison;
    }
  });
}

TEST(EqualBits, WhenPartsRunOnThreads) {
  for_each_entry([](const kernels::Entry& entry) {
    World w(spec_of(entry, Format::kQ8, {900, 70}));
    const std::vector<Query> queries = {{0, 900, 2}, {1, 70, 70}};
    const Rows alone = w.attend(queries);
    EXPECT_EQ(w.attend_on_threads(queries, 4), alone);
  });
}

}  // namespace
}  // namespace pagedkv
