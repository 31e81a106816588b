// The loop of an engine: reserve -> append, attend, merge for each layer -> commit. Two sequences share a prefix.
//
// Random numbers stand in for a model: K, V and q depend on layer, token and position alone, as they would in one
// with fixed weights, so what is taken from the cache must give the same attention as computing it again.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <vector>

#include "pagedkv/cache.h"
#include "pagedkv/scratch.h"

using pagedkv::AttendArgs;
using pagedkv::Blocks;
using pagedkv::Cache;
using pagedkv::Format;
using pagedkv::Result;
using pagedkv::Scratch;
using pagedkv::Status;
using pagedkv::StepPlan;
using pagedkv::StepRequest;
using pagedkv::Tokens;

namespace {

constexpr int kLayers = 2;
constexpr int64_t kQueryHeads = 4, kKvHeads = 2, kHeadDim = 64;

struct Projections {
  std::vector<float> q;     // [n_tokens, kQueryHeads, kHeadDim]
  std::vector<float> k, v;  // [n_tokens, kKvHeads, kHeadDim]
};

// The stand-in for a model's QKV product and rotary embedding.
Projections project(int layer, std::span<const StepRequest> requests, const StepPlan& plan) {
  Projections rows;
  size_t row = 0;
  for (const StepRequest& request : requests) {
    for (const int32_t token : request.tokens) {
      std::minstd_rand random(uint32_t(layer * 1000003 + token * 1009 + plan.positions()[row++] + 1));
      std::uniform_real_distribution<float> value(-1, 1);
      for (int64_t i = 0; i < kQueryHeads * kHeadDim; ++i) rows.q.push_back(value(random));
      for (int64_t i = 0; i < kKvHeads * kHeadDim; ++i) rows.k.push_back(value(random));
      for (int64_t i = 0; i < kKvHeads * kHeadDim; ++i) rows.v.push_back(value(random));
    }
  }
  return rows;
}

// One step over the new tokens of any number of sequences. Returns the last layer's attention,
// [n_tokens, kQueryHeads, kHeadDim].
Result<std::vector<float>> step(Cache& cache, std::span<const StepRequest> requests) {
  Result<StepPlan> plan = cache.reserve(requests);  // every block the step needs, or a capacity error
  if (!plan.ok()) return plan.status();

  std::vector<float> out(plan->n_tokens() * kQueryHeads * kHeadDim);
  Scratch memory;
  const auto scratch = memory.get(cache.scratch_bytes(*plan, 1, kQueryHeads));
  if (!scratch.ok()) return scratch.status();
  for (int layer = 0; layer < kLayers; ++layer) {
    const Projections rows = project(layer, requests, *plan);  // the model's part: q, k, v
    const AttendArgs args{.plan = *plan,
                          .layer = layer,
                          .num_q_heads = kQueryHeads,
                          .q = rows.q.data(),
                          .out = out.data(),
                          .scratch = *scratch};
    Status status = cache.append(*plan, layer, {.data = rows.k.data()}, {.data = rows.v.data()});
    if (status.ok()) status = cache.attend(args);  // over packed blocks, this step's rows included
    if (status.ok()) status = cache.merge(args);
    if (!status.ok()) return status;  // the plan ends its step: every sequence keeps its length
  }

  Result<std::vector<Status>> committed = cache.commit(std::move(*plan));  // lengths grow, full blocks get keys
  if (!committed.ok()) return committed.status();
  for (const Status& sequence : *committed) {
    if (!sequence.ok()) return sequence;
  }
  return out;
}

int failures = 0;

void expect(bool claim, const char* what) {
  if (claim) return;
  std::fprintf(stderr, "not so: %s\n", what);
  ++failures;
}

// Opens a sequence with this prompt and computes what the cache does not hold. Returns the last token's attention.
struct Opened {
  pagedkv::SequenceId id;
  Tokens reused;
  std::vector<float> last_row;
};
Result<Opened> open(Cache& cache, std::span<const int32_t> prompt, bool reuse) {
  auto started = cache.start(prompt, {.reuse = reuse});
  if (!started.ok()) return started.status();
  const StepRequest request{.sequence = started->id, .tokens = prompt.subspan(started->reused.n)};
  auto out = step(cache, {&request, 1});
  if (!out.ok()) return out.status();
  return Opened{started->id, started->reused, {out->end() - kQueryHeads * kHeadDim, out->end()}};
}

}  // namespace

int main() {
  auto created = Cache::create({.groups = {{.shape = {.num_kv_heads = kKvHeads,
                                                      .head_dim_k = kHeadDim,
                                                      .head_dim_v = kHeadDim,
                                                      .formats = {Format::kQ8, Format::kQ8}},
                                            .layers = {0, 1}}},
                                .block_size = Tokens(16),
                                .num_blocks = Blocks(64)});
  if (!created.ok()) {
    std::fprintf(stderr, "%s\n", created.status().message().c_str());
    return 1;
  }
  Cache& cache = **created;

  // A system prompt of 40 tokens (two whole blocks and a half), then two different questions.
  std::vector<int32_t> first(40), second(40);
  for (int i = 0; i < 40; ++i) first[i] = second[i] = 100 + i;
  first.insert(first.end(), {1, 2, 3});
  second.insert(second.end(), {7, 8, 9, 10, 11});

  auto a = open(cache, first, true);
  auto b = open(cache, second, true);
  auto cold = open(cache, second, false);  // the same prompt with nothing taken from the cache
  for (const auto* opened : {&a, &b, &cold}) {
    if (!opened->ok()) {
      std::fprintf(stderr, "%s\n", opened->status().message().c_str());
      return 1;
    }
  }
  expect(a->reused == Tokens(0), "the first prompt finds an empty cache");
  expect(b->reused >= Tokens(32), "the second prompt takes over the two blocks that both begin with");
  expect(b->last_row == cold->last_row, "attention over shared blocks has the bits of computing them again");
  expect(cache.stats().blocks_shared == 2, "two blocks have two holders");

  // Both sequences decode in one step.
  const int32_t next_a = 21, next_b = 22;
  const StepRequest decode[] = {{.sequence = a->id, .tokens = {&next_a, 1}},
                                {.sequence = b->id, .tokens = {&next_b, 1}}};
  auto out = step(cache, decode);
  expect(out.ok() && out->size() == 2 * kQueryHeads * kHeadDim, "a decode step gives one row a sequence");
  expect(cache.length(a->id).value() == Tokens(44) && cache.length(b->id).value() == Tokens(46),
         "lengths grew by one");

  for (const auto* opened : {&a, &b, &cold})
    expect(cache.release((*opened)->id).ok(), "a sequence can be released");
  const pagedkv::Stats stats = cache.stats();
  expect(stats.dense_materializations == 0, "no dense copy was made");
  expect(stats.growth_bytes_copied == 0, "growth copied nothing");
  expect(cache.verify().ok(), "every invariant holds");

  std::printf("%s: second prompt of %zu tokens reused %lld, %lld blocks stay cached\n", cache.isa().data(),
              second.size(), static_cast<long long>(b->reused.n), static_cast<long long>(stats.blocks_cached));
  return failures == 0 ? 0 : 1;
}
