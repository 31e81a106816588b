// Attention over paged blocks, cold: as bytes a second, as a share of what this machine reads, and beside ggml.

#include <algorithm>
#include <charconv>
#include <numeric>
#include <random>

#include "bench/bench.h"
#include "bench/measure.h"
#include "bench/peaks.h"
#include "bench/peer.h"
#include "bench/record.h"
#include "bench/samples.h"
#include "bench/table.h"
#include "engine/engine.h"
#include "pagedkv/cache.h"
#include "pagedkv/scratch.h"

namespace pagedkv::bench {
namespace {

constexpr int64_t kPrefillRows = 512;
constexpr int64_t kDecodeRuns = 11, kPrefillRuns = 7;  // samples that are wanted
constexpr int64_t kPrefillPeerRuns = 3;                // ggml takes seconds for one

// decode_{q heads}_{kv heads}_{head_dim}_{sequences}x{tokens}, prefill_{q heads}_{kv heads}_{head_dim}_{depth}.
struct Case {
  std::string name;
  int64_t heads_q = 0, heads_kv = 0, head_dim = 0;
  int64_t batch = 1, tokens = 0, rows = 1;
};

const char* const kDefaultCases[] = {"decode_32_8_128_1x32k", "decode_9_3_64_1x8k",    "decode_4_1_256_1x32k",
                                     "decode_32_32_128_8x4k", "decode_28_4_128_1x32k", "prefill_32_8_128_8k"};
const char* const kShapes[] = {"decode_32_8_128_", "decode_9_3_64_", "decode_4_1_256_", "decode_32_32_128_",
                               "decode_28_4_128_"};
const char* const kBatches[] = {"1x32k", "8x4k", "64x512"};

std::vector<std::string> case_names(const BenchOptions& options) {
  if (!options.cases.empty()) return options.cases;
  std::vector<std::string> names(std::begin(kDefaultCases), std::end(kDefaultCases));
  for (const std::string shape : kShapes)
    for (const char* batch : kBatches)
      if (options.full && std::ranges::find(names, shape + batch) == names.end()) names.push_back(shape + batch);
  return names;
}

Result<Case> parse_case(const std::string& name) {
  const auto refused = [&] {
    return invalid_argument("[bench] case \"" + name +
                            "\" is not of the form decode_32_8_128_1x32k (q heads, KV heads, head_dim, sequences x "
                            "tokens) or prefill_9_3_64_8k (depth)");
  };
  Case c{.name = name};
  std::string_view rest = name;
  const bool decode = rest.starts_with("decode_");
  if (!decode && !rest.starts_with("prefill_")) return refused();
  rest.remove_prefix(decode ? 7 : 8);
  const auto number = [&](char end) -> int64_t {  // -1 when there is none in 1 .. 2^20
    int64_t value = 0;
    const auto [at, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    if (error != std::errc() || value < 1 || value > 1 << 20) return -1;
    rest.remove_prefix(size_t(at - rest.data()));
    if (end == '\0' && rest.starts_with('k')) {
      value *= 1024;
      rest.remove_prefix(1);
    }
    if (end == '\0') return rest.empty() ? value : -1;
    if (!rest.starts_with(end)) return -1;
    rest.remove_prefix(1);
    return value;
  };
  c.heads_q = number('_');
  c.heads_kv = number('_');
  c.head_dim = number('_');
  if (decode) c.batch = number('x');
  c.tokens = number('\0');
  if (!decode) c.rows = kPrefillRows, c.tokens += kPrefillRows;
  if (c.heads_q < 1 || c.heads_kv < 1 || c.head_dim < 1 || c.batch < 1 || c.tokens <= (decode ? 0 : kPrefillRows))
    return refused();
  return c;
}

// A cache that holds many copies of a case's K and V: a pass walks them in turn, so that no byte is still in a
// cache of the CPU. Up to 32 layers are copies, as in a model; after that, further sequences are.
class Paged {
 public:
  static Result<std::unique_ptr<Paged>> make(const Case& c, Format format, QueryPath path, int64_t at_least,
                                             int threads) {
    auto paged = std::make_unique<Paged>();
    const auto layers = int(std::min<int64_t>(at_least, 32));
    const int64_t sets = (at_least + layers - 1) / layers;
    GroupSpec group{.shape = {c.heads_kv, c.head_dim, c.head_dim, {format, format}}};
    for (int l = 0; l < layers; ++l) group.layers.push_back(l);
    const int64_t blocks = sets * c.batch * ((c.tokens + 15) / 16);
    auto made = Cache::create({.groups = {group},
                               .num_blocks = Blocks(blocks),
                               .dynamic = false,
                               .prefix_sharing = false,
                               .query_path = path,
                               .q_heads_per_kv_head = c.heads_q / c.heads_kv});
    if (!made.ok()) return made.status();
    paged->cache = std::move(*made);
    paged->layers = layers;
    paged->heads_q_ = c.heads_q;
    if (Status status = paged->scatter(blocks); !status.ok()) return status;
    if (Status status = paged->fill(c, sets); !status.ok()) return status;
    for (int64_t set = 0; set < sets; ++set) {
      std::vector<ReadRequest> reads;
      for (int64_t s = 0; s < c.batch; ++s)
        reads.push_back({paged->sequences[size_t(set * c.batch + s)], Tokens(c.rows)});
      auto plan = paged->cache->plan_read(reads);
      if (!plan.ok()) return plan.status();
      paged->plans.push_back(std::move(*plan));
    }
    const auto scratch = paged->memory_.get(paged->cache->scratch_bytes(paged->plans[0], threads, c.heads_q));
    if (!scratch.ok()) return scratch.status();
    paged->scratch_ = *scratch;
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    paged->q.resize(size_t(c.batch * c.rows * c.heads_q * c.head_dim));
    for (float& x : paged->q) x = normal(random);
    paged->out.resize(paged->q.size());
    return paged;
  }

  int64_t copies() const { return int64_t(plans.size()) * layers; }
  // The attention over n copies from `first` on, one after the other, by the team.
  void attend(Team& team, int64_t first, int64_t n) {
    team.run([&](Part part) {
      for (int64_t i = first; i < first + n; ++i) {
        const int64_t copy = i % copies();
        const AttendArgs args{.plan = plans[size_t(copy / layers)],
                              .layer = int(copy % layers),
                              .num_q_heads = heads_q_,
                              .q = q.data(),
                              .out = out.data(),
                              .scratch = scratch_};
        if (!cache->attend(args, part).ok()) std::abort();
        team.sync();
        if (!cache->merge(args, part).ok()) std::abort();
        team.sync();  // the scratch is free again
      }
    });
  }
  double output_norm() const { return std::inner_product(out.begin(), out.end(), out.begin(), 0.0); }

  std::unique_ptr<Cache> cache;
  std::vector<StepPlan> plans;  // one a set of c.batch sequences
  std::vector<SequenceId> sequences;
  std::vector<float> q, out;
  int layers = 0;

 private:
  // Gives every block out once and takes them back in random order, so that tables are scattered as in long use.
  Status scatter(int64_t blocks) {
    std::vector<SequenceId> holders;
    for (int64_t i = 0; i < blocks; ++i) {
      auto started = cache->start({});
      if (!started.ok()) return started.status();
      holders.push_back(started->id);
      if (Status status = write(started->id, 1, {}); !status.ok()) return status;
    }
    std::shuffle(holders.begin(), holders.end(), std::mt19937(5));
    for (const SequenceId id : holders)
      if (Status status = cache->release(id); !status.ok()) return status;
    return Status();
  }
  Status write(SequenceId id, int64_t n, const std::vector<float>& rows) {
    const StepRequest request{.sequence = id, .tokens = {}, .n_tokens = Tokens(n)};
    auto step = cache->reserve({&request, 1});
    if (!step.ok()) return step.status();
    for (int layer = 0; layer < layers && !rows.empty(); ++layer)
      if (Status status = cache->append(*step, layer, {rows.data()}, {rows.data()}); !status.ok()) return status;
    auto done = cache->commit(std::move(*step));
    if (!done.ok()) return done.status();
    return Status();
  }
  Status fill(const Case& c, int64_t sets) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> rows(size_t(512 * c.heads_kv * c.head_dim));
    for (float& x : rows) x = normal(random);
    for (int64_t s = 0; s < sets * c.batch; ++s) {
      auto started = cache->start({});
      if (!started.ok()) return started.status();
      sequences.push_back(started->id);
      for (int64_t at = 0; at < c.tokens; at += 512)
        if (Status status = write(started->id, std::min<int64_t>(512, c.tokens - at), rows); !status.ok())
          return status;
    }
    return Status();
  }

  Scratch memory_;
  std::span<std::byte> scratch_;
  int64_t heads_q_ = 0;
};

// What a case is held against.
struct Limits {
  ReadLimit read;
  double f32_ops = 0, int8_ops = 0;  // operations a second, two a multiply-add
};

// The peak of the best path that this CPU has for products with stored values of the format. It is measured again
// for every case, and the best kept: at the start other programs may have had the cores.
double peak_of(Limits& limits, Format format, Team& team) {
  const bool codes = format == Format::kQ8 || format == Format::kQ6 || format == Format::kQ4;
  double& best = codes ? limits.int8_ops : limits.f32_ops;
  return best = std::max(best, (codes ? int8_peak(team) : f32_peak(team)).ops);
}

Result<Record> run_case(const Case& c, Format format, const BenchOptions& options, Team& team, Limits& limits) {
  const LayerShape shape{c.heads_kv, c.head_dim, c.head_dim, {format, format}};
  const int64_t bytes = bytes_per_token(shape).n * c.tokens * c.batch;
  const int64_t at_least = std::max<int64_t>((8 * last_level_cache() + bytes - 1) / bytes, 2);
  auto paged = Paged::make(c, format, options.query_path, at_least, team.size());
  if (!paged.ok()) return paged.status();
  Paged& ours = **paged;
  const bool decode = c.rows == 1;

  std::function<void(int64_t)> peer;
  if (options.peer == "ggml") {
    peer = ggml_attention({.heads_q = c.heads_q,
                           .heads_kv = c.heads_kv,
                           .head_dim = c.head_dim,
                           .batch = c.batch,
                           .tokens = c.tokens,
                           .rows = c.rows,
                           .copies = ours.copies()},
                          format, team.size());
  }
  ours.attend(team, 0, 1);  // warm-up, and one check that something was computed
  if (!(ours.output_norm() > 0)) return Status(Code::kInternal, "[bench] the attention of " + c.name + " is empty");
  double peer_call = 0;
  if (peer) {
    const double begin = now_seconds();
    peer(1);
    peer_call = now_seconds() - begin;
  }

  // Ours walks every copy in a sample, ggml as many as take 50 ms: it is slower, and its samples shall be as
  // steady.
  const int64_t calls = decode ? ours.copies() : 1;
  const int64_t peer_calls = decode && peer ? std::clamp<int64_t>(int64_t(0.05 / peer_call), 1, calls) : 1;
  int64_t next = 0;
  Sampling sampling(limits.read);
  const auto [mine, theirs] = sampling.take({.wanted = decode ? kDecodeRuns : kPrefillRuns,
                                             .run =
                                                 [&] {
                                                   ours.attend(team, next, calls);
                                                   next += calls;
                                                 }},
                                            {.wanted = decode ? kDecodeRuns : kPrefillPeerRuns,
                                             .run = peer ? [&] { peer(peer_calls); } : std::function<void()>()});
  // K and V each take one multiply-add for every channel of every visible key, query row and query head.
  const double keys_seen = double(c.batch) * double(c.rows) * (double(c.tokens) - double(c.rows - 1) / 2);
  const double ops = 2 * 2 * keys_seen * double(c.heads_q) * double(c.head_dim);
  const double compute_seconds = ops / peak_of(limits, format, team);
  std::vector<double> seconds, share, roofline, peer_seconds;
  for (const Sample& s : mine.samples) {
    seconds.push_back(s.seconds / double(calls));
    share.push_back(double(bytes) / seconds.back() / s.bandwidth);
    roofline.push_back(std::max(double(bytes) / s.bandwidth, compute_seconds) / seconds.back());
  }
  for (const Sample& s : theirs.samples) peer_seconds.push_back(s.seconds / double(peer_calls));
  Record r{.name = c.name,
           .format = format_name(format),
           .heads_q = c.heads_q,
           .heads_kv = c.heads_kv,
           .head_dim = c.head_dim,
           .batch = c.batch,
           .tokens = c.tokens - (decode ? 0 : c.rows),
           .threads = team.size(),
           .isa = std::string(ours.cache->isa()),
           .share = spread_of(share).median,
           .roofline = spread_of(roofline).median,
           .slow_samples = mine.thrown + theirs.thrown,
           .slow_kept = mine.slow_kept + theirs.slow_kept};
  set_seconds(r, seconds);
  r.gbps = double(bytes) / r.seconds / 1e9;
  if (const auto tensors = ours.cache->tensors(0); tensors.ok()) r.arena_huge = on_huge_pages(tensors->k.data);
  set_peer(r, "ggml", peer_seconds);
  return r;
}

}  // namespace

Result<std::vector<Record>> bench_kernels(const BenchOptions& options, std::ostream& table) {
  if (!options.peer.empty() && options.peer != "ggml")
    return invalid_argument("[bench] peer \"" + options.peer + "\" is not one of the kernel cases' peers: ggml");
  const auto cases = parse_cases(case_names(options), parse_case);
  if (!cases.ok()) return cases.status();
  const std::vector<Format> formats = options.formats.empty()
                                          ? std::vector<Format>{Format::kF16, Format::kQ8, Format::kQ6, Format::kQ4}
                                          : options.formats;
  Team team(options.threads > 0 ? options.threads : engine::default_threads());
  const Pages memory(read_buffer_bytes());
  if (memory.size() == 0)
    return Status(Code::kUnavailable,
                  "[bench] the system gave no " + std::to_string(read_buffer_bytes()) + " bytes to read");
  Limits limits{.read = ReadLimit(team, memory), .f32_ops = f32_peak(team).ops, .int8_ops = int8_peak(team).ops};
  std::vector<Record> records;
  print_limits(table, limits.read.best(), limits.f32_ops, limits.int8_ops,
               page_note("the memory that bandwidth is measured on", on_huge_pages(memory.data())));
  print_head(table);
  for (const Case& c : *cases)
    for (const Format format : formats) {
      auto made = run_case(c, format, options, team, limits);
      if (!made.ok()) return made.status();
      records.push_back(*made);
      print_row(table, records.back());
    }
  return records;
}

}  // namespace pagedkv::bench
