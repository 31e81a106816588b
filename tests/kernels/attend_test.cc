// attend and merge against attention in double over the stored bytes.
#include "tests/kernels/paged_world.h"

namespace pagedkv {
namespace {

constexpr ArenaOrder kOrders[] = {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor};

TEST(Attend, ADecodeRowAndAPrefillMatchTheReferenceAtEveryHeadDim) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (int64_t d : {1, 8, 12, 64, 80, 96, 128, 192, 256, 512}) {
      if (!check_head_dim(format, d).ok()) continue;
      SCOPED_TRACE(d);
      World w({.entry = entry,
               .format_k = format,
               .format_v = format,
               .num_kv_heads = 2,
               .head_dim_k = d,
               .head_dim_v = d,
               .order = kOrders[d / 8 % 2],
               .lengths = {70, 21}});
      const std::vector<Query> queries = {{0, 70, 1}, {1, 21, 21}};
      w.expect_near_reference(w.attend(queries), queries);
    }
  });
}

TEST(Attend, KeysAndValuesMayDifferInHeadDimAndFormat) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (Format format_v : {Format::kF16, Format::kQ8, Format::kQ4}) {
      SCOPED_TRACE(format_name(format_v));
      World w({.entry = entry,
               .format_k = format,
               .format_v = format_v,
               .num_kv_heads = 2,
               .group = 2,
               .head_dim_k = 192,
               .head_dim_v = 128,
               .lengths = {90}});
      const std::vector<Query> queries = {{0, 90, 2}, {0, 90, 30}};
      w.expect_near_reference(w.attend(queries), queries);
    }
  });
}

TEST(Attend, EveryGroupSizeIsServed) {  // O-NUM-12
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64}) {
      SCOPED_TRACE(group);
      World w({.entry = entry,
               .format_k = format,
               .format_v = format,
               .num_kv_heads = 2,
               .group = group,
               .head_dim_k = 32,
               .head_dim_v = 32,
               .lengths = {67}});
      const std::vector<Query> queries = {{0, 67, 1}, {0, 67, 3}, {0, 40, 17}};
      w.expect_near_reference(w.attend(queries), queries);
    }
  });
}

TEST(Attend, EveryBlockSizeIsServed) {  // O-NUM-10, O-NUM-14
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (int64_t block_size : {1, 3, 7, 16, 20, 32, 48, 64, 100, 256}) {
      SCOPED_TRACE(block_size);
      for (ArenaOrder order : kOrders) {
        World w({.entry = entry,
                 .format_k = format,
                 .format_v = format,
                 .num_kv_heads = 3,
                 .group = 2,
                 .head_dim_k = 16,
                 .head_dim_v = 16,
                 .block_size = block_size,
                 .order = order,
                 .lengths = {300}});
        std::vector<Query> queries = {{0, 300, 1}, {0, 300, 10}};
        for (int64_t n : {block_size, 2 * block_size, 2 * block_size + 1}) {
          if (n <= 300) queries.push_back({0, n, 1});
        }
        w.expect_near_reference(w.attend(queries), queries);
      }
    }
  });
}

TEST(Attend, ManyRunsOfDecodeMatchTheReference) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    World w(
        {.entry = entry, .format_k = format, .format_v = format, .num_kv_heads = 2, .group = 3, .lengths = {1500}});
    const std::vector<Query> queries = {{0, 1500, 1}, {0, 1024, 4}, {0, 1025, 8}, {0, 257, 1}, {0, 256, 1}};
    w.expect_near_reference(w.attend(queries, 3), queries);
    EXPECT_EQ(w.n_splits(), 4);  // 256 keys are one run
  });
}

TEST(Attend, ALongPrefillAfterAPrefixMatchesTheReference) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    World w(
        {.entry = entry, .format_k = format, .format_v = format, .num_kv_heads = 1, .group = 3, .lengths = {700}});
    const std::vector<Query> queries = {{0, 700, 150}};
    w.expect_near_reference(w.attend(queries, 2), queries);
  });
}

TEST(Attend, ARaggedBatchMixesPrefillDecodeAndVerification) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    World w({.entry = entry,
             .format_k = format,
             .format_v = format,
             .num_kv_heads = 2,
             .group = 2,
             .head_dim_k = 48,
             .head_dim_v = 48,
             .lengths = {1, 5, 64, 65, 130, 513}});
    const std::vector<Query> queries = {{5, 513, 1}, {2, 64, 64}, {0, 1, 1}, {4, 130, 5},
                                        {1, 0, 0},   {3, 65, 65}, {1, 5, 1}, {5, 300, 9}};
    w.expect_near_reference(w.attend(queries, 2), queries);
  });
}

TEST(Attend, AWindowEndsWhereItSaysInDecodeAndPrefill) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (int64_t window : {1, 2, 5, 63, 64, 65, 200, 256, 400, 5000}) {
      SCOPED_TRACE(window);
      World w({.entry = entry,
               .format_k = format,
               .format_v = format,
               .num_kv_heads = 1,
               .group = 2,
               .head_dim_k = 32,
               .head_dim_v = 32,
               .lengths = {600},
               .sliding_window = window});
      const std::vector<Query> queries = {{0, 600, 1}, {0, 513, 8}, {0, 512, 3}, {0, 300, 70}};
      w.expect_near_reference(w.attend(queries), queries);
    }
  });
}

TEST(Attend, BlocksBehindTheWindowMayBeGone) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    World w({.entry = entry,
             .format_k = format,
             .format_v = format,
             .head_dim_k = 32,
             .head_dim_v = 32,
             .lengths = {600},
             .sliding_window = 100});
    const std::vector<Query> queries = {{0, 600, 1}, {0, 600, 20}};
    const Rows whole = w.attend(queries);
    for (int64_t b = 0; b < (600 - 20 - 100 + 1) / 16; ++b) w.tables()[0][size_t(b)] = -1;
    EXPECT_EQ(w.attend(queries), whole);
  });
}

TEST(Attend, ATableEntryThatNamesNoBlockMasksItsKeys) {  // O-MEM-11
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (int32_t bad : {-1, 100000, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
      World w(
          {.entry = entry,
           .format_k = format,
           .format_v = format,
           .lengths = {48},
           .q = [](auto...) { return 0.0f; },
           .v = [](int64_t, int64_t position, auto...) { return position < 16 || position >= 32 ? 1.0f : 9.0f; }});
      w.tables()[0][1] = bad;
      for (int64_t n : {1, 48}) {
        const Rows rows = w.attend({{0, 48, n}});
        EXPECT_NEAR(rows.out.back(), 1.0f, 1e-5f);
        EXPECT_NEAR(rows.lse.back(), std::log(32.0f), 1e-5f);
      }
    }
  });
}

TEST(Attend, SoftcapBendsLogitsAsTanhDoes) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (float softcap : {0.5f, 5.0f, 50.0f, 1e4f}) {
      SCOPED_TRACE(softcap);
      World w({.entry = entry,
               .format_k = format,
               .format_v = format,
               .group = 2,
               .lengths = {300},
               .scale = 1,
               .softcap = softcap});
      const std::vector<Query> queries = {{0, 300, 1}, {0, 100, 20}};
      w.expect_near_reference(w.attend(queries), queries);
    }
  });
}

TEST(Attend, ASinkJoinsEachRowOnceSplitOrNot) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    World w({.entry = entry,
             .format_k = format,
             .format_v = format,
             .num_kv_heads = 2,
             .group = 2,
             .lengths = {600},
             .sinks = {0.5f, -30.0f, 9.0f, 200.0f}});
    const std::vector<Query> queries = {{0, 600, 1}, {0, 600, 30}, {0, 100, 2}, {0, 3, 5}};
    w.expect_near_reference(w.attend(queries), queries);
    EXPECT_EQ(w.n_splits(), 1);
  });
}

TEST(Attend, LargeLogitsConstantRowsOutliersAndTinyValuesStayWithinTolerance) {
  struct Kind {
    const char* name;
    WorldSpec::Values k, v;
  };
  const auto noise = [](int64_t t, int64_t c) { return float((t * 7919 + c * 104729) % 1009) / 504.5f - 1; };
  const Kind kinds[] = {
      {"large logits", [=](int64_t, int64_t t, int64_t, int64_t c) { return 60 * noise(t, c); }, nullptr},
      {"constant rows", [](int64_t, int64_t t, int64_t, int64_t) { return float(t % 5); },
       [](int64_t, int64_t t, int64_t, int64_t) { return float(t); }},
      {"outliers", [=](int64_t, int64_t t, int64_t, int64_t c) { return c == 3 ? 40.0f : noise(t, c); },
       [=](int64_t, int64_t t, int64_t, int64_t c) { return t % 97 == 0 ? 1e4f : noise(t, c); }},
      {"tiny values", [=](int64_t, int64_t t, int64_t, int64_t c) { return 1e-20f * noise(t, c); },
       [=](int64_t, int64_t t, int64_t, int64_t c) { return 1e-6f * noise(c, t); }},
      {"alternating signs", [](int64_t, int64_t t, int64_t, int64_t c) { return (t + c) % 2 ? 3.0f : -3.0f; },
       [](int64_t, int64_t t, int64_t, int64_t) { return t % 2 ? 1.0f : -1.0f; }},
      {"growing logits", [](int64_t, int64_t t, int64_t, int64_t) { return 0.05f * float(t); }, nullptr},
  };
  for_each_entry_and_format([&](const kernels::Entry& entry, Format format) {
    for (const Kind& kind : kinds) {
      SCOPED_TRACE(kind.name);
      World w({.entry = entry,
               .format_k = format,
               .format_v = format,
               .group = 2,
               .lengths = {400},
               .k = kind.k,
               .v = kind.v});
      const std::vector<Query> queries = {{0, 400, 1}, {0, 200, 12}};
      w.expect_near_reference(w.attend(queries), queries);
    }
  });
}

TEST(Attend, ANanInAQueryStaysInItsRow) {
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec{.entry = entry, .format_k = format, .format_v = format, .lengths = {300}};
    const auto wave = [](int64_t, int64_t t, int64_t, int64_t c) { return std::sin(float(3 * t + c)); };
    spec.q = spec.k = spec.v = wave;
    World good(spec);
    spec.q = [&](int64_t s, int64_t t, int64_t h, int64_t c) {
      return t == 297 && c == 9 ? kNan : wave(s, t, h, c);
    };
    World bad(spec);
    for (int64_t n : {5, 20}) {
      const Rows want = good.attend({{0, 300, n}}), got = bad.attend({{0, 300, n}});
      for (int64_t row = 0; row < n; ++row) {
        EXPECT_EQ(std::isnan(got.lse[size_t(row)]), row == n - 3);
        for (int64_t c = row * 64; c < row * 64 + 64; ++c) {
          if (row == n - 3) {
            EXPECT_TRUE(std::isnan(got.out[size_t(c)]));
          } else {
            EXPECT_EQ(got.out[size_t(c)], want.out[size_t(c)]);
          }
        }
      }
    }
  });
}

TEST(Attend, ABatchWithoutTokensDoesNothing) {
  for_each_entry([](const kernels::Entry& entry) {
    World w({.entry = entry, .lengths = {4}});
    EXPECT_TRUE(w.attend({}, 2).out.empty());
    EXPECT_TRUE(w.attend({{0, 4, 0}}, 2).out.empty());
  });
}

}  // namespace
}  // namespace pagedkv
