// Matrix products of quantized weights: ours beside ggml's, from one token to many.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <random>

#include "bench/bench.h"
#include "bench/measure.h"
#include "bench/peaks.h"
#include "bench/peer.h"
#include "bench/record.h"
#include "bench/samples.h"
#include "bench/table.h"
#include "engine/engine.h"
#include "pagedkv/products.h"
#include "pagedkv/scratch.h"

namespace pagedkv::bench {
namespace {

constexpr int kSamples = 9;
constexpr double kSampleSeconds = 3e-3;    // at least
constexpr int64_t kFewTokens = 8;          // steps of answers: their weights come from memory
constexpr int64_t kColdBytes = 512 << 20;  // that copies of such a weight have together, at least
constexpr int64_t kSmallBytes = 16 << 10;  // of codes that every thread quantizes for itself, as in the engine
constexpr double kMostDifference = 0.05;   // relative RMS between the two: they round differently

const char* const kShapes[] = {"Q4_1_576x576",  "Q4_1_1536x576",  "Q4_1_576x1536",  "Q8_0_4096x576",
                               "Q5_0_2048x640", "Q4_0_4096x4096", "Q4_K_4096x4096", "Q6_K_4096x4096"};
const int kTokens[] = {1, 4, 32, 512};
const int kScan[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,   10,  11,  12,  13,  14,  15,  16, 20,
                     24, 31, 32, 33, 48, 64, 65, 96, 128, 192, 256, 257, 384, 512, 513, 600};

// TYPE_OUTxIN_nTOKENS
struct Case {
  std::string name;
  WeightFormat format = WeightFormat::kQ40;
  int64_t n_out = 0, n_in = 0, n_tokens = 0;
};

std::vector<std::string> case_names(const BenchOptions& options) {
  std::vector<std::string> names = options.cases;
  if (!names.empty()) return names;
  for (const std::string shape : kShapes) {
    const auto add = [&](int n) { names.push_back(shape + "_n" + std::to_string(n)); };
    options.full ? std::ranges::for_each(kScan, add) : std::ranges::for_each(kTokens, add);
  }
  return names;
}

Result<Case> parse_case(const std::string& name) {
  const auto refused = [&] {
    std::string formats;
    for (const WeightFormat format : weight_formats())
      formats += (formats.empty() ? "" : ", ") + std::string(weight_format_name(format));
    return invalid_argument("[bench] case \"" + name + "\" is not of the form Q4_1_576x1536_n512: a format (" +
                            formats +
                            "), "
                            "rows (at least 32) x columns (whole blocks) of the weight, and tokens");
  };
  Case c{.name = name};
  std::string_view rest = name;
  bool known = false;
  for (const WeightFormat format : weight_formats()) {
    const std::string_view format_name = weight_format_name(format);
    if (!rest.starts_with(format_name)) continue;
    c.format = format;
    rest.remove_prefix(format_name.size());
    known = true;
    break;
  }
  const auto number = [&](std::string_view before) -> int64_t {  // 0 when there is none in 1 .. 2^17
    if (!rest.starts_with(before)) return 0;
    rest.remove_prefix(before.size());
    int64_t value = 0;
    const auto [at, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    if (error != std::errc() || value < 1 || value > 1 << 17) return 0;
    rest.remove_prefix(size_t(at - rest.data()));
    return value;
  };
  c.n_out = number("_");
  c.n_in = number("x");
  c.n_tokens = number("_n");
  if (!known || !rest.empty() || c.n_tokens == 0 || !MatrixProducts::takes(c.format, c.n_out, c.n_in))
    return refused();
  return c;
}

class Ours {
 public:
  Ours(const MatrixProducts& products, const Case& c, std::span<const std::byte> weights, int64_t copies,
       std::span<const float> x)
      : products_(products), c_(c), weights_(weights), copies_(copies), x_(x) {}

  Status prepare(int threads) {
    const int64_t codes = MatrixProducts::quantized_bytes(c_.n_in, c_.n_tokens);
    thread_bytes_ = (MatrixProducts::scratch_bytes() + codes + 4095) / 4096 * 4096;
    const auto memory = memory_.get(Bytes(thread_bytes_ * threads + codes));
    if (!memory.ok()) return memory.status();
    shared_ = memory->data() + thread_bytes_ * threads;
    of_threads_ = memory->data();
    y.resize(size_t(c_.n_tokens * c_.n_out));
    return Status();
  }
  void run(Team& team, int64_t first, int64_t n) {
    team.run([&](Part part) {
      for (int64_t i = first; i < first + n; ++i) {
        one(team, i % copies_, part);
        team.sync();
      }
    });
  }
  std::vector<float> y;

 private:
  void one(Team& team, int64_t copy, Part part) {
    std::byte* scratch = of_threads_ + thread_bytes_ * part.index;
    const bool small = MatrixProducts::quantized_bytes(c_.n_in, c_.n_tokens) <= kSmallBytes;
    std::byte* codes = small ? scratch + MatrixProducts::scratch_bytes() : shared_;
    const Part quantizes = small ? Part{} : part;
    if (!products_.quantize(x_.data(), c_.n_in, c_.n_in, c_.n_tokens, codes, quantizes).ok()) std::abort();
    if (!small) team.sync();
    const int64_t row_bytes = weight_row_bytes(c_.format, c_.n_in);
    const MatrixProducts::Call call{.weight = {.data = weights_.data() + copy * c_.n_out * row_bytes,
                                               .format = c_.format,
                                               .n_out = c_.n_out,
                                               .n_in = c_.n_in,
                                               .row_bytes = row_bytes},
                                    .x = codes,
                                    .n_tokens = c_.n_tokens,
                                    .y = y.data(),
                                    .y_stride = c_.n_out,
                                    .scratch = scratch};
    if (!products_.multiply(call, part).ok()) std::abort();
  }

  const MatrixProducts& products_;
  const Case& c_;
  std::span<const std::byte> weights_;
  int64_t copies_;
  std::span<const float> x_;
  Scratch memory_;
  std::byte *shared_ = nullptr, *of_threads_ = nullptr;
  int64_t thread_bytes_ = 0;
};

// Copies of a weight that no cache holds together.
int64_t cold_copies(int64_t bytes) { return (std::max(kColdBytes, 2 * last_level_cache()) + bytes - 1) / bytes; }

// Calls that take kSampleSeconds together. Doubled until they do: a call alone is mostly the waking of the threads.
int64_t calls_of_sample(Ours& ours, Team& team, int64_t& next) {
  for (int64_t n = 1;; n *= 2) {
    const double begin = now_seconds();
    ours.run(team, next, n);
    next += n;
    if (now_seconds() - begin >= kSampleSeconds) return n;
  }
}

Status check_equal(const Case& c, std::span<const float> ours, std::span<const float> peers) {
  double difference = 0, all = 0;
  for (size_t i = 0; i < ours.size(); ++i) {
    difference += std::pow(double(ours[i]) - double(peers[i]), 2);
    all += std::pow(double(peers[i]), 2);
  }
  if (all > 0 && std::sqrt(difference / all) <= kMostDifference) return Status();
  return Status(Code::kInternal, "[bench] " + c.name + ": ours and ggml's product are not the same");
}

// A random weight is made in f32, a few rows at a time; vectors and results are there twice.
Status check_memory(const Case& c, int64_t weight_bytes) {
  const int64_t needs = weight_bytes + 2 * c.n_tokens * (c.n_in + c.n_out) * int64_t{sizeof(float)};
  const int64_t most = engine::machine_memory({}).limit.n / 2;
  if (needs <= most) return Status();
  return Status(Code::kCapacity, "[bench] " + c.name + " takes " + std::to_string(needs >> 20) +
                                     " MiB; half of what this process may use is " + std::to_string(most >> 20));
}

Result<Record> run_case(const Case& c, const BenchOptions& options, const MatrixProducts& products, Team& team,
                        ReadLimit& read) {
  const int64_t bytes = c.n_out * weight_row_bytes(c.format, c.n_in);
  const int64_t copies = c.n_tokens <= kFewTokens ? cold_copies(bytes) : 1;
  if (Status s = check_memory(c, bytes * copies); !s.ok()) return s;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t(c.n_tokens * c.n_in));
  for (float& v : x) v = normal(random);
  GgmlProduct ggml({.type = std::string(weight_format_name(c.format)),
                    .n_out = c.n_out,
                    .n_in = c.n_in,
                    .n_tokens = c.n_tokens,
                    .copies = copies},
                   x, team.size());
  Ours ours(products, c, ggml.weights(), copies, x);
  if (Status s = ours.prepare(team.size()); !s.ok()) return s;
  ours.run(team, 0, 1);
  ggml.run(1);
  ggml.sleep();  // its threads would poll into our first samples
  if (Status s = check_equal(c, ours.y, ggml.result()); !s.ok()) return s;

  const bool peer = options.peer == "ggml";
  int64_t next = 1;
  const int64_t n = calls_of_sample(ours, team, next);
  std::vector<double> mine, theirs;
  for (int i = 0; i < kSamples; ++i) {
    if (c.n_tokens <= kFewTokens) read.read();
    double begin = now_seconds();
    ours.run(team, next, n);
    mine.push_back((now_seconds() - begin) / double(n));
    next += n;
    if (!peer) continue;
    begin = now_seconds();
    ggml.run(n);
    theirs.push_back((now_seconds() - begin) / double(n));
    ggml.sleep();
  }
  Record r{.name = c.name,
           .format = std::string(weight_format_name(c.format)),
           .tokens = c.n_tokens,
           .threads = team.size(),
           .isa = std::string(products.isa())};
  set_seconds(r, mine);
  set_peer(r, "ggml", theirs);
  if (c.n_tokens <= kFewTokens) {
    r.gbps = double(bytes) / r.seconds / 1e9;
    r.share = *r.gbps * 1e9 / read.best();
  } else if (const double peak = int8_peak(team).ops; peak > 0) {
    r.share = 2 * double(c.n_out) * double(c.n_in) * double(c.n_tokens) / r.seconds / peak;
  }
  return r;
}

}  // namespace

Result<std::vector<Record>> bench_products(const BenchOptions& options, std::ostream& table) {
  if (!options.peer.empty() && options.peer != "ggml")
    return invalid_argument("[bench] peer \"" + options.peer + "\" is not one of the products' peers: ggml");
  const auto cases = parse_cases(case_names(options), parse_case);
  if (!cases.ok()) return cases.status();
  const auto products = MatrixProducts::create();
  if (!products.ok()) return products.status();
  Team team(options.threads > 0 ? options.threads : engine::default_threads());
  const Pages memory(read_buffer_bytes());
  if (memory.size() == 0)
    return Status(Code::kUnavailable,
                  "[bench] the system gave no " + std::to_string(read_buffer_bytes()) + " bytes to read");
  ReadLimit read(team, memory);
  std::vector<Record> records;
  print_head(table);
  for (const Case& c : *cases) {
    auto record = run_case(c, options, *products, team, read);
    if (!record.ok()) return record.status();
    records.push_back(std::move(*record));
    print_row(table, records.back());
  }
  return records;
}

}  // namespace pagedkv::bench
