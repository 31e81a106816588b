// What the int8 path adds to what the format has lost already.
#include <cstdio>

#include "tests/kernels/paged_world.h"

namespace pagedkv {
namespace {

double loss_of(const kernels::Entry& entry, Format format, int64_t head_dim, bool codes, float logit_deviation) {
  World w({.entry = entry,
           .format_k = format,
           .format_v = format,
           .k_codes = codes,
           .v_codes = codes,
           .num_kv_heads = 2,
           .group = 4,
           .head_dim_k = head_dim,
           .head_dim_v = head_dim,
           .lengths = {1000},
           .scale = logit_deviation / std::sqrt(float(head_dim))});
  const std::vector<Query> queries = {{0, 1000, 2}};
  return w.loss(w.attend(queries), queries);
}

TEST(QueryPath, Int8LosesAtMostATenthMoreThanTheFormatAlone) {
  for_each_entry([](const kernels::Entry& entry) {
    for (const Format format : {Format::kQ8, Format::kQ6, Format::kQ4}) {
      for (const int64_t d : {64, 128, 256}) {
        SCOPED_TRACE(std::string(format_name(format)) + " " + std::to_string(d));
        const double f32 = loss_of(entry, format, d, false, 1), int8 = loss_of(entry, format, d, true, 1);
        EXPECT_LE(int8, 1.10 * f32);
        std::printf("%-12s %-3s d %-3d f32 %.5f int8 %.5f ratio %.3f\n", std::string(entry.name).c_str(),
                    format_name(format), int(d), f32, int8, int8 / f32);
      }
    }
  });
}

}  // namespace
}  // namespace pagedkv
