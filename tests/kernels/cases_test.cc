// Public bug reports (CASES.md, class NUM) with their own shapes and numbers. O-NUM-07 is in sparse_test.cc,
// O-NUM-09 in quantize_test.cc too, O-NUM-12 in attend_test.cc too.
#include "tests/kernels/paged_world.h"

namespace pagedkv {
namespace {

const auto kZero = [](auto...) { return 0.0f; };
const auto kOne = [](auto...) { return 1.0f; };
const auto kPosition = [](int64_t, int64_t position, int64_t, int64_t) { return float(position); };

// D=4, one head, q zero: the output is the mean of the visible V.
WorldSpec uniform(const kernels::Entry& entry, Format format, std::vector<int64_t> lengths) {
  return {.entry = entry,
          .format_k = format,
          .format_v = format,
          .head_dim_k = 4,
          .head_dim_v = 4,
          .lengths = std::move(lengths),
          .q = kZero,
          .v = kPosition};
}

// Constant rows quantize exactly up to the rounding of the scale and of code * scale. By codes, a weight is rounded
// to a step of the largest.
float exact_enough(float largest = 4) { return use_codes ? largest * 0.5f / 127 : 1e-5f; }

TEST(Case, ARowLongerThanItsKeysSeesNothingInItsFirstRows) {  // O-NUM-01
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec = uniform(entry, format, {2});
    spec.q = spec.k = spec.v = kOne;
    World w(spec);
    const Rows rows = w.attend({{0, 2, 5}});
    for (int row = 0; row < 3; ++row) {
      EXPECT_EQ(rows.lse[size_t(row)], -kInfinity);
      EXPECT_EQ(rows.out[size_t(row * 4)], 0.0f);
    }
    EXPECT_NEAR(rows.out[12], 1.0f, exact_enough());
    EXPECT_NEAR(rows.lse[3], 2.0f, exact_enough());
    EXPECT_NEAR(rows.out[16], 1.0f, exact_enough());
    EXPECT_NEAR(rows.lse[4], 2.693147f, exact_enough());
  });
}

TEST(Case, MergingEmptyPartialResultsMakesNoNan) {  // O-NUM-02
  const auto merged = [](std::vector<std::pair<float, float>> states) {
    auto [out, lse] = states[0];
    for (size_t i = 1; i < states.size(); ++i) merge_states(&out, &lse, &states[i].first, &states[i].second, 1, 1);
    return std::pair(out, lse);
  };
  const std::pair<float, float> empty(0, -kInfinity), full(3, 0.5f);
  EXPECT_EQ(merged({empty, empty}), empty);
  EXPECT_EQ(merged({full, empty}), full);
  EXPECT_EQ(merged({empty, full}), full);
  EXPECT_EQ(merged({empty, empty, full, empty}), full);
}

TEST(Case, AnEmptySequenceInABatchGivesZero) {  // O-NUM-03
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec = uniform(entry, format, {4, 0, 1});
    spec.v = [](int64_t, int64_t position, auto...) { return float(position + 1); };
    World w(spec);
    const Rows rows = w.attend({{0, 4, 1}, {1, 0, 1}, {2, 1, 1}});
    EXPECT_NEAR(rows.out[0], 2.5f, exact_enough());
    EXPECT_EQ(rows.out[4], 0.0f);
    EXPECT_EQ(rows.lse[1], -kInfinity);
    EXPECT_NEAR(rows.out[8], 1.0f, exact_enough());
  });
}

TEST(Case, VeryNegativeLogitsAreNotTakenForMaskedOnes) {  // O-NUM-04
  for_each_entry([](const kernels::Entry& entry) {
    WorldSpec spec = uniform(entry, Format::kF32, {3});
    spec.q = [](auto...) { return 300.0f; };
    spec.k = [](auto...) { return -300.0f; };
    spec.v = [](int64_t, int64_t position, auto...) { return float(position + 1); };
    World w(spec);
    const Rows rows = w.attend({{0, 3, 1}});
    EXPECT_NEAR(rows.out[0], 2.0f, exact_enough());
    EXPECT_NEAR(rows.lse[0], -179998.90f, 0.05f);
  });
}

TEST(Case, DotProductsPastTheHalfRangeStayFinite) {  // O-NUM-05
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec = uniform(entry, format, {2});
    spec.head_dim_k = 128;
    spec.q = [](auto...) { return 256.0f; };
    spec.k = [](int64_t, int64_t position, auto...) { return 256.0f - float(position); };
    spec.v = [](int64_t, int64_t position, auto...) { return 1.0f + 4 * float(position); };
    World w(spec);
    const Rows rows = w.attend({{0, 2, 1}});
    EXPECT_TRUE(std::isfinite(rows.lse[0]));
    // bf16 and a scale of 256/127 cannot tell 255 from 256 by much, but still by hundreds of logits: or not at all.
    EXPECT_NEAR(rows.out[0], 1.0f, exact_enough());
  });
}

TEST(Case, UnusedSlotsAreNeverRead) {  // O-NUM-06
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (float poison : {kNan, kInfinity}) {
      WorldSpec spec = uniform(entry, format, {5});
      spec.head_dim_k = spec.head_dim_v = 64;
      spec.poison = poison;
      World w(spec);
      EXPECT_NEAR(w.attend({{0, 5, 1}}).out[0], 2.0f, exact_enough());
      const Rows rows = w.attend({{0, 5, 3}});
      EXPECT_NEAR(rows.out[0], 1.0f, exact_enough());
      EXPECT_NEAR(rows.out[64], 1.5f, exact_enough());
      EXPECT_NEAR(rows.out[128], 2.0f, exact_enough());
    }
  });
}

TEST(Case, HeadDimsThatNoGroupDividesWork) {  // O-NUM-08
  for_each_entry([](const kernels::Entry& entry) {
    for (Format format : {Format::kQ8, Format::kQ4}) {
      for (int64_t d : {80, 96}) {
        World w({.entry = entry,
                 .format_k = format,
                 .format_v = format,
                 .head_dim_k = d,
                 .head_dim_v = d,
                 .lengths = {3}});
        w.expect_near_reference(w.attend({{0, 3, 3}}), {{0, 3, 3}});
      }
    }
  });
}

TEST(Case, TheLastElementOfAnOddHeadDimSurvives) {  // O-NUM-09
  for_each_entry([](const kernels::Entry& entry) {
    for (int64_t d : {1, 7, 33}) {
      World w({.entry = entry,
               .format_k = Format::kQ4,
               .format_v = Format::kQ4,
               .head_dim_k = d,
               .head_dim_v = d,
               .v = [d](int64_t, int64_t, int64_t, int64_t c) { return 7.0f * float(c + 1) / float(d); }});
      EXPECT_NEAR(w.attend({{0, 1, 1}}).out.back(), 7.0f, 0.5f);
    }
  });
}

TEST(Case, TilesDoNotDropTheTailOfOddBlocks) {  // O-NUM-10
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (int64_t block_size : {48, 20, 3}) {
      for (int64_t n : {2 * block_size, 2 * block_size + 1}) {
        WorldSpec spec = uniform(entry, format, {n});
        spec.block_size = block_size;
        World w(spec);
        const float mean = float(n - 1) / 2;
        EXPECT_NEAR(w.attend({{0, n, 1}}).out[0], mean,
                    2e-6f * mean + (format == Format::kBF16 ? 0.3f
                                    : use_codes             ? exact_enough(float(n))
                                                            : 0));
      }
    }
  });
}

TEST(Case, AWholeNumberOfBlocksHasNoBlockTooMany) {  // O-NUM-11
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec = uniform(entry, format, {12});
    spec.block_size = 4;
    spec.poison = 1e4f;
    World w(spec);
    for (int64_t n = 1; n <= 12; ++n) EXPECT_NEAR(w.attend({{0, n, 1}}).out[0], float(n - 1) / 2, exact_enough(12));
  });
}

TEST(Case, EveryQueryHeadFindsItsKvHead) {  // O-NUM-12
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (int64_t ratio : {6, 3, 7, 5}) {
      WorldSpec spec = uniform(entry, format, {5});
      spec.num_kv_heads = 4;
      spec.group = ratio;
      spec.v = [](int64_t, int64_t, int64_t head, int64_t) { return float(head + 1); };
      World w(spec);
      for (int64_t n : {1, 3}) {
        const Rows rows = w.attend({{0, 5, n}});
        for (size_t i = 0; i < rows.out.size(); ++i) {
          EXPECT_NEAR(rows.out[i], float(int64_t(i) / 4 % (4 * ratio) / ratio + 1), exact_enough());
        }
      }
    }
  });
}

TEST(Case, BlocksOfOneTokenAreServed) {  // O-NUM-14
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec = uniform(entry, format, {17});
    spec.block_size = 1;
    World one(spec);
    spec.block_size = 16;
    World sixteen(spec);
    for (int64_t n : {1, 2, 17}) EXPECT_EQ(one.attend({{0, n, 1}}).out, sixteen.attend({{0, n, 1}}).out);
  });
}

TEST(Case, TheCausalMaskIsAlignedToTheBottomRight) {  // O-NUM-15
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    World w(uniform(entry, format, {5}));
    const Rows rows = w.attend({{0, 5, 2}});
    EXPECT_NEAR(rows.out[0], 1.5f, exact_enough());
    EXPECT_NEAR(rows.out[4], 2.0f, exact_enough());
  });
}

TEST(Case, SoftcapComesBeforeTheMask) {  // O-NUM-16
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec = uniform(entry, format, {2});
    spec.softcap = 1.0f;
    spec.v = [](int64_t, int64_t position, auto...) { return 100 * float(position); };
    World w(spec);
    const Rows rows = w.attend({{0, 2, 2}});
    EXPECT_EQ(rows.out[0], 0.0f);
    EXPECT_NEAR(rows.out[4], 50.0f, 1e-4f);
  });
}

TEST(Case, ASinkIsCountedOnceSplitWindowedOrNeither) {  // O-NUM-17
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    const auto out = [&](int64_t length, int64_t window, float sink) {
      WorldSpec spec = uniform(entry, format, {length});
      spec.v = [](auto...) { return 8.0f; };
      spec.sliding_window = window;
      spec.sinks = {sink};
      World w(spec);
      return w.attend({{0, length, 1}}).out[0];
    };
    const float ln2 = std::log(2.0f);
    EXPECT_NEAR(out(2, 0, ln2), 4.0f, exact_enough());
    EXPECT_NEAR(out(5, 2, ln2), 4.0f, exact_enough());
    EXPECT_NEAR(out(257, 2, ln2), 4.0f, exact_enough());  // one key in each of two runs
    EXPECT_NEAR(out(512, 0, std::log(512.0f)), 4.0f, 1e-4f);
  });
}

TEST(Case, AWindowCountsItsOwnPositionInDecodePrefillAndChunks) {  // O-NUM-18
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec = uniform(entry, format, {10});
    spec.sliding_window = 4;
    World w(spec);
    EXPECT_NEAR(w.attend({{0, 10, 1}}).out[0], 7.5f, exact_enough(10));
    EXPECT_NEAR(w.attend({{0, 10, 10}}).out[36], 7.5f, exact_enough(10));
    EXPECT_NEAR(w.in_chunks(0, 3).out[36], 7.5f, exact_enough(10));
  });
}

TEST(Case, RowsOfZerosDecodeToZeros) {  // O-NUM-19
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec = uniform(entry, format, {2});
    spec.q = nullptr;
    spec.k = kZero;
    spec.v = [](int64_t, int64_t position, auto...) { return 2 * float(position); };
    World w(spec);
    EXPECT_EQ(w.counters().floor_clamped_rows, 0);
    EXPECT_EQ(w.attend({{0, 1, 1}}).out[0], 0.0f);
    EXPECT_NEAR(w.attend({{0, 2, 1}}).out[0], 1.0f, exact_enough());
  });
}

TEST(Case, TheSmallestRowsStayFinite) {  // O-NUM-20
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    for (float top : {1e-38f, 5.7e-35f, 1e-42f}) {
      WorldSpec spec = uniform(entry, format, {1});
      spec.v = spec.k = [top](int64_t, int64_t, int64_t, int64_t c) { return c % 2 ? top : -top; };
      World w(spec);
      const Rows rows = w.attend({{0, 1, 1}});
      for (size_t c = 0; c < 4; ++c) {
        EXPECT_LE(std::fabs(rows.out[c]), 1e-34f);
        EXPECT_GE(rows.out[c] * (c % 2 ? 1.0f : -1.0f), 0.0f);
      }
      EXPECT_TRUE(std::isfinite(rows.lse[0]));
    }
  });
}

TEST(Case, AnOutlierDoesNotReachItsNeighbour) {  // O-NUM-21
  for_each_entry_and_format([](const kernels::Entry& entry, Format format) {
    WorldSpec spec = uniform(entry, format, {2});
    spec.v = [](int64_t, int64_t position, int64_t, int64_t c) { return position == 0 && c == 2 ? 1e7f : 1.0f; };
    spec.sliding_window = 1;
    World w(spec);
    const Rows rows = w.attend({{0, 2, 2}});
    for (float x : rows.out) EXPECT_TRUE(std::isfinite(x));
    EXPECT_NEAR(rows.out[2], format == Format::kF16 ? 65504.0f : 1e7f, 1e5f);
    EXPECT_EQ(w.counters().saturated_values, format == Format::kF16 ? 1 : 0);
    for (size_t c = 4; c < 8; ++c) EXPECT_NEAR(rows.out[c], 1.0f, exact_enough());
  });
}

}  // namespace
}  // namespace pagedkv
