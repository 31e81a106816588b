// Measurements behind `pagedkv bench`: each gives one record a case and format.
#pragma once

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "pagedkv/attention.h"
#include "pagedkv/format.h"
#include "pagedkv/status.h"

namespace pagedkv::bench {

struct BenchOptions {
  std::vector<std::string> cases;  // names to run; empty: all
  std::vector<Format> formats;     // empty: f16, q8, q6, q4
  std::vector<int64_t> depths;     // model cases: tokens already stored when timing starts; empty: 16
  std::string peer;                // "" (none), "ggml" or "llama": measured in turn, in the same process
  int threads = 0;                 // 0: engine::default_threads()
  std::string model;               // path of a GGUF file; model cases only
  bool full = false;               // kernel cases: 1 x 32k, 8 x 4k and 64 x 512 of every shape
  QueryPath query_path = QueryPath::kAuto;
  bool reproducible = false;  // model cases: EngineOptions::reproducible
  bool json = false;          // the caller prints the records; the table is then for stderr
};

// One case in one format. What a case does not have stays empty and is null in JSON.
struct Record {
  std::string name;    // the case: "decode_32_8_128_1x32k", "decode", "prefill"
  std::string format;  // "f16", "q8", "q6", "q4"; "" where no format takes part
  int64_t heads_q = 0;
  int64_t heads_kv = 0;
  int64_t head_dim = 0;
  int64_t batch = 0;   // sequences
  int64_t tokens = 0;  // stored tokens of each sequence; model cases: the depth
  int threads = 0;
  std::string isa;          // the kernel entry that ran
  double seconds = 0;       // median of one run
  double p10 = 0, p90 = 0;  // of the same runs, seconds
  int64_t runs = 0;
  std::optional<double> gbps;  // bytes of K and V read, 1e9 a second
  // Medians of ratios, each with the read bandwidth (as many threads, 2 MiB pages) around the very sample:
  std::optional<double> share;     // bytes a second over that bandwidth
  std::optional<double> roofline;  // max(bytes / bandwidth, multiply-adds / peak of the format) over the time
  // Samples are slow when the bandwidth around them was: see docs/benchmarks.md.
  std::optional<int64_t> slow_samples;  // of both sides, thrown away
  std::optional<int64_t> slow_kept;     // among `runs`, because too few others came
  std::optional<double> arena_huge;     // share of the cache's memory on 2 MiB pages
  std::string peer;                     // "" when none ran
  std::optional<double> peer_seconds;
  std::optional<double> ratio;  // peer_seconds / seconds: above 1 we are faster
};

// One limit of this machine. One multiply-add counts as two operations.
struct LimitRecord {
  std::string limit;  // "read", "f32_fma", "int8_dot", "bf16_dot"
  std::string pages;  // "4KiB", "2MiB"; "" where memory takes no part
  int threads = 0;
  std::string path;            // the instruction that reached it
  std::optional<double> gbps;  // 1e9 bytes a second, the best sample
  std::optional<double> median_gbps;
  std::optional<double> gops;  // 1e9 operations a second, the best sample; none: see note
  std::optional<double> huge;  // share of what was read that was on 2 MiB pages
  std::string note;            // why a limit is missing or is not what it should be
};

// Errors: kUnavailable (no memory to read).
Result<std::vector<LimitRecord>> bench_limits(const BenchOptions& options, std::ostream& table);

// Each checks its result once before timing and writes a table to `table` as it goes.
// Errors: kInvalidArgument (a case or peer that does not exist, with those that do), those of loading a model.
Result<std::vector<Record>> bench_cache(const BenchOptions& options, std::ostream& table);
Result<std::vector<Record>> bench_kernels(const BenchOptions& options, std::ostream& table);
// share: with up to 8 tokens of the read bandwidth, with more of the peak of int8 products.
Result<std::vector<Record>> bench_products(const BenchOptions& options, std::ostream& table);
Result<std::vector<Record>> bench_model(const BenchOptions& options, std::ostream& table);

// Bytes a second that so many threads read from memory on 2 MiB pages, the best of five; 0: no memory to try it
// with.
double read_rate(int threads);

}  // namespace pagedkv::bench
