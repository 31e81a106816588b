// The walls that every other figure is held against: reading memory, and multiplying.

#include <algorithm>
#include <cstdio>

#include "bench/bench.h"
#include "bench/measure.h"
#include "bench/peaks.h"
#include "engine/engine.h"

namespace pagedkv::bench {
namespace {

constexpr int kReads = 9;

void print_limit(std::ostream& out, const LimitRecord& r) {
  char value[32] = "-", line[200];
  if (r.gbps) std::snprintf(value, sizeof value, "%.1f GB/s", *r.gbps);
  if (r.gops) std::snprintf(value, sizeof value, "%.0f GOP/s", *r.gops);
  std::snprintf(line, sizeof line, "%-10s %-6s %7d %12s   %s\n", r.limit.c_str(),
                r.pages.empty() ? "-" : r.pages.c_str(), r.threads, value,
                (!r.note.empty()   ? r.note
                 : !r.path.empty() ? r.path
                                   : std::string())
                    .c_str());
  out << line << std::flush;
}

LimitRecord peak_record(const char* limit, const Peak& peak, int threads) {
  LimitRecord r{.limit = limit, .threads = threads, .path = peak.path, .note = peak.missing};
  if (peak.ops > 0) r.gops = peak.ops / 1e9;
  return r;
}

}  // namespace

Result<std::vector<LimitRecord>> bench_limits(const BenchOptions& options, std::ostream& table) {
  const int threads = options.threads > 0 ? options.threads : engine::default_threads();
  const Pages small(read_buffer_bytes(), PageSize::k4KiB), large(read_buffer_bytes(), PageSize::k2MiB);
  if (small.size() == 0 || large.size() == 0)
    return Status(Code::kUnavailable,
                  "[bench] the system gave no " + std::to_string(read_buffer_bytes()) + " bytes to read, twice");
  const std::optional<double> small_huge = on_huge_pages(small.data()), large_huge = on_huge_pages(large.data());
  std::vector<LimitRecord> records;
  const auto add = [&](LimitRecord r) {
    records.push_back(std::move(r));
    print_limit(table, records.back());
  };
  char head[120];
  std::snprintf(head, sizeof head, "%-10s %-6s %7s %12s\n", "limit", "pages", "threads", "best");
  table << head;
  for (int n = 1; n <= threads; ++n) {
    Team team(n);
    std::vector<double> of_small, of_large;
    for (int sample = 0; sample < kReads; ++sample) {  // in turn: a slow spell meets both
      of_small.push_back(read_bandwidth(team, small) / 1e9);
      of_large.push_back(read_bandwidth(team, large) / 1e9);
    }
    const auto read = [&](const char* pages, const std::vector<double>& gbps, std::optional<double> huge) {
      return LimitRecord{.limit = "read",
                         .pages = pages,
                         .threads = n,
                         .gbps = *std::ranges::max_element(gbps),
                         .median_gbps = spread_of(gbps).median,
                         .huge = huge};
    };
    add(read("4KiB", of_small, small_huge));
    LimitRecord on_large = read("2MiB", of_large, large_huge);
    on_large.note = page_note("this memory", large_huge);
    add(on_large);
  }
  for (const int n : threads > 1 ? std::vector<int>{1, threads} : std::vector<int>{1}) {
    Team team(n);
    add(peak_record("f32_fma", f32_peak(team), n));
    add(peak_record("int8_dot", int8_peak(team), n));
    add(peak_record("bf16_dot", bf16_peak(team), n));
  }
  return records;
}

}  // namespace pagedkv::bench
