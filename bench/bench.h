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
  QueryPath query_path = QueryPath::kAuto;
  bool reproducible = false;       // model cases: EngineOptions::reproducible
  bool json = false;               // the caller prints the records; the table is then for stderr
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
  std::optional<double> gbps;      // bytes of K and V read, 1e9 a second
  std::optional<double> share;     // of the read bandwidth that as many threads reach here over 2 MiB pages
  std::optional<double> roofline;  // max(bytes / bandwidth, multiply-adds / f32 FMA peak) over the time
  std::string peer;                // "" when none ran
  std::optional<double> peer_seconds;
  std::optional<double> ratio;  // peer_seconds / seconds: above 1 we are faster
};

// Each checks its result once before timing and writes a table to `table` as it goes.
// Errors: kInvalidArgument (a case or peer that does not exist, with those that do), those of loading a model.
Result<std::vector<Record>> bench_cache(const BenchOptions& options, std::ostream& table);
Result<std::vector<Record>> bench_kernels(const BenchOptions& options, std::ostream& table);
Result<std::vector<Record>> bench_model(const BenchOptions& options, std::ostream& table);

// Bytes a second that so many threads read from memory on 2 MiB pages, the best of five; 0: no memory to try it
// with.
double read_rate(int threads);

}  // namespace pagedkv::bench
