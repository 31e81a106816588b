// One step on several threads: each runs its share of append, attend and merge. The bits are those of one thread.
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "pagedkv/cache.h"
#include "pagedkv/scratch.h"

using pagedkv::AttendArgs;
using pagedkv::Cache;
using pagedkv::Format;
using pagedkv::Part;
using pagedkv::Result;
using pagedkv::Scratch;
using pagedkv::Status;
using pagedkv::StepPlan;
using pagedkv::StepRequest;

namespace {

constexpr int kLayers = 2;
constexpr int64_t kQueryHeads = 4, kKvHeads = 2, kHeadDim = 64, kTokens = 300;

// Random numbers stand in for a model's q, k and v: [n_tokens, heads, kHeadDim].
std::vector<float> random_rows(uint32_t seed, int64_t n_tokens, int64_t heads) {
  std::minstd_rand random(seed);
  std::uniform_real_distribution<float> value(-1, 1);
  std::vector<float> rows(n_tokens * heads * kHeadDim);
  for (float& x : rows) x = value(random);
  return rows;
}

// All layers of a step. Returns the last layer's attention, [n_tokens, kQueryHeads, kHeadDim].
Result<std::vector<float>> run_layers(Cache& cache, StepPlan& plan, int n_threads) {
  const int64_t n_tokens = plan.n_tokens();
  const std::vector<float> q = random_rows(1, n_tokens, kQueryHeads);
  const std::vector<float> k = random_rows(2, n_tokens, kKvHeads), v = random_rows(3, n_tokens, kKvHeads);
  std::vector<float> out(n_tokens * kQueryHeads * kHeadDim);
  Scratch memory;
  const auto scratch = memory.get(cache.scratch_bytes(plan, n_threads, kQueryHeads));
  if (!scratch.ok()) return scratch.status();

  std::barrier everybody(n_threads);
  std::vector<Status> statuses(n_threads);
  const auto work = [&](int thread) {
    const Part part{.index = thread, .count = n_threads};
    Status& status = statuses[thread];
    for (int layer = 0; layer < kLayers; ++layer) {
      const AttendArgs args{.plan = plan,
                            .layer = layer,
                            .num_q_heads = kQueryHeads,
                            .q = q.data(),
                            .out = out.data(),
                            .scratch = *scratch};
      if (status.ok()) status = cache.append(plan, layer, {.data = k.data()}, {.data = v.data()}, part);
      everybody.arrive_and_wait();  // attend reads the rows that others append
      if (status.ok()) status = cache.attend(args, part);
      everybody.arrive_and_wait();  // merge reads what others attended
      if (status.ok()) status = cache.merge(args, part);
      everybody.arrive_and_wait();  // the model goes on with out, and the next layer overwrites the scratch
    }
  };
  std::vector<std::jthread> threads;
  for (int thread = 1; thread < n_threads; ++thread) threads.emplace_back(work, thread);
  work(0);
  threads.clear();  // joins them

  for (const Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return out;
}

Result<std::vector<float>> prompt_on(int n_threads) {
  auto cache = Cache::create({.groups = {{.shape = {.num_kv_heads = kKvHeads,
                                                    .head_dim_k = kHeadDim,
                                                    .head_dim_v = kHeadDim,
                                                    .formats = {Format::kQ8, Format::kQ8}},
                                          .layers = {0, 1}}}});
  if (!cache.ok()) return cache.status();
  std::vector<int32_t> prompt(kTokens);
  for (int32_t i = 0; i < kTokens; ++i) prompt[i] = i;
  auto started = (*cache)->start(prompt);
  if (!started.ok()) return started.status();
  const StepRequest request{.sequence = started->id, .tokens = prompt};
  auto plan = (*cache)->reserve({&request, 1});
  if (!plan.ok()) return plan.status();
  auto out = run_layers(**cache, *plan, n_threads);
  if (!out.ok()) return out;
  auto committed = (*cache)->commit(std::move(*plan));
  if (!committed.ok()) return committed.status();
  if (!committed->front().ok()) return committed->front();
  return out;
}

}  // namespace

int main() {
  const auto one = prompt_on(1), three = prompt_on(3);
  for (const auto* out : {&one, &three}) {
    if (!out->ok()) return std::fprintf(stderr, "%s\n", out->status().message().c_str()), 1;
  }
  const bool same = *one == *three;
  std::printf("attention of %zu values on 1 and 3 threads: %s\n", one->size(), same ? "same bits" : "NOT the same");
  return same ? 0 : 1;
}
