// The cache's own operations: taking and giving blocks, looking a prefix up, planning a step.

#include <cstdint>
#include <numeric>
#include <random>

#include "bench/bench.h"
#include "bench/measure.h"
#include "bench/record.h"
#include "bench/table.h"
#include "pagedkv/cache.h"

namespace pagedkv::bench {
namespace {

// Small rows: what is measured is integers, not memory.
CacheOptions small_rows(int64_t num_blocks, bool sharing, int64_t block_size = 16) {
  CacheOptions options{.groups = {GroupSpec{.shape = {1, 8, 8, {}}, .layers = {0}}},
                       .block_size = Tokens(block_size),
                       .num_blocks = Blocks(num_blocks),
                       .dynamic = false,
                       .prefix_sharing = sharing};
  return options;
}

std::vector<int32_t> random_tokens(int64_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (auto& token : tokens) token = int32_t(random() % 50000);
  return tokens;
}

Status write(Cache& cache, SequenceId sequence, std::span<const int32_t> tokens) {
  const StepRequest request{.sequence = sequence, .tokens = tokens};
  auto plan = cache.reserve({&request, 1});
  if (!plan.ok()) return plan.status();
  auto done = cache.commit(std::move(*plan));
  if (!done.ok()) return done.status();
  return Status();
}

Record record(const char* name, int64_t batch, int64_t tokens, const std::vector<double>& samples) {
  Record r{.name = name, .batch = batch, .tokens = tokens, .threads = 1};
  set_seconds(r, samples);
  return r;
}

// Seconds that one block adds to a reserve and its release: a step that takes many against one that takes few, so
// that what a step costs by itself falls out. Blocks of one token: the arrays per token would hide the pool.
Result<Record> block_take_and_give() {
  auto cache = Cache::create(small_rows(8192, false, 1));
  if (!cache.ok()) return cache.status();
  const auto round = [&](int64_t blocks) -> Result<double> {
    auto started = (*cache)->start({});
    if (!started.ok()) return started.status();
    const auto one = [&](int64_t n_tokens) -> Status {
      const StepRequest request{.sequence = started->id, .tokens = {}, .n_tokens = Tokens(n_tokens)};
      auto plan = (*cache)->reserve({&request, 1});
      if (!plan.ok()) return plan.status();
      plan->abandon();
      return Status();
    };
    const double begin = now_seconds();
    Status status = one(blocks);
    const double seconds = now_seconds() - begin;
    if (Status released = (*cache)->release(started->id); !released.ok()) return released;
    if (!status.ok()) return status;
    return seconds;
  };
  std::vector<double> samples;
  for (int i = 0; i < 60; ++i) {
    auto many = round(4096), few = round(96);
    if (!many.ok()) return many.status();
    if (!few.ok()) return few.status();
    if (i >= 10) samples.push_back((*many - *few) / 4000);
  }
  return record("reserve_release_block", 1, 1, samples);
}

Result<Record> prefix_lookup(int64_t n_tokens) {
  auto cache = Cache::create(small_rows(n_tokens / 16 + 64, true));
  if (!cache.ok()) return cache.status();
  const auto prompt = random_tokens(n_tokens, 1);
  auto first = (*cache)->start(prompt);
  if (!first.ok()) return first.status();
  if (Status status = write(**cache, first->id, prompt); !status.ok()) return status;
  if (Status status = (*cache)->release(first->id); !status.ok()) return status;
  PrefixMatch match = (*cache)->match(prompt);
  std::vector<double> samples;
  for (int i = 0; i < 60; ++i) {
    const double begin = now_seconds();
    match = (*cache)->match(prompt, std::move(match));
    const double seconds = now_seconds() - begin;
    if (match.cached.n < n_tokens - 16) return Status(Code::kInternal, "[bench] the prefix was not found");
    if (i >= 10) samples.push_back(seconds);
  }
  return record("prefix_lookup_50k", 1, n_tokens, samples);
}

Result<Record> plan_step(int64_t n_sequences, int64_t length) {
  auto cache = Cache::create(small_rows(n_sequences * (length / 16 + 2), false));
  if (!cache.ok()) return cache.status();
  std::vector<StepRequest> requests;
  const auto one = random_tokens(1, 2);
  for (int64_t i = 0; i < n_sequences; ++i) {
    auto started = (*cache)->start({});
    if (!started.ok()) return started.status();
    if (Status status = write(**cache, started->id, random_tokens(length, uint32_t(i))); !status.ok())
      return status;
    requests.push_back({.sequence = started->id, .tokens = one});
  }
  std::vector<double> samples;
  for (int i = 0; i < 60; ++i) {
    const double begin = now_seconds();
    auto plan = (*cache)->reserve(requests);
    const double seconds = now_seconds() - begin;
    if (!plan.ok()) return plan.status();
    plan->abandon();
    if (i >= 10) samples.push_back(seconds);
  }
  return record("plan_256x8k", n_sequences, length, samples);
}

}  // namespace

Result<std::vector<Record>> bench_cache(const BenchOptions& options, std::ostream& table) {
  struct Case {
    const char* name;
    std::function<Result<Record>()> run;
  };
  const Case cases[] = {{"reserve_release_block", block_take_and_give},
                        {"prefix_lookup_50k", [] { return prefix_lookup(50000); }},
                        {"plan_256x8k", [] { return plan_step(256, 8192); }}};
  for (const std::string& asked : options.cases) {
    if (std::none_of(std::begin(cases), std::end(cases), [&](const Case& c) { return asked == c.name; }))
      return invalid_argument("[bench] case \"" + asked +
                              "\" is none of reserve_release_block, prefix_lookup_50k, plan_256x8k");
  }
  if (!options.peer.empty())
    return invalid_argument("[bench] the cache cases have no peer, \"" + options.peer + "\" is asked");
  std::vector<Record> records;
  print_head(table);
  for (const Case& c : cases) {
    if (!options.cases.empty() && std::ranges::find(options.cases, c.name) == options.cases.end()) continue;
    auto made = c.run();
    if (!made.ok()) return made.status();
    records.push_back(*made);
    print_row(table, records.back());
  }
  return records;
}

}  // namespace pagedkv::bench
