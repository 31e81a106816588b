// A context that lies in two caches: attention over each, joined by log-sum-exp, is attention over the whole.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "pagedkv/cache.h"
#include "pagedkv/scratch.h"

using pagedkv::AttendArgs;
using pagedkv::Cache;
using pagedkv::ReadRequest;
using pagedkv::Result;
using pagedkv::Scratch;
using pagedkv::SequenceId;
using pagedkv::Status;
using pagedkv::StepRequest;
using pagedkv::Tokens;

namespace {

constexpr int64_t kQueryHeads = 4, kKvHeads = 2, kHeadDim = 64;
constexpr int64_t kFirst = 200, kSecond = 100;  // tokens in the two parts

std::vector<float> random_values(uint32_t seed, int64_t n) {
  std::minstd_rand random(seed);
  std::uniform_real_distribution<float> value(-1, 1);
  std::vector<float> values(n);
  for (float& x : values) x = value(random);
  return values;
}

// A cache of one layer and its only sequence.
struct Holder {
  std::unique_ptr<Cache> cache;
  SequenceId sequence;
};

// K and V: [n_tokens, kKvHeads, kHeadDim].
Result<Holder> hold(std::span<const float> k, std::span<const float> v) {
  auto cache = Cache::create({.groups = {{.shape = {kKvHeads, kHeadDim, kHeadDim, {}}, .layers = {0}}}});
  if (!cache.ok()) return cache.status();
  auto started = (*cache)->start({});
  if (!started.ok()) return started.status();
  const int64_t n_tokens = int64_t(k.size()) / (kKvHeads * kHeadDim);
  const StepRequest request{.sequence = started->id, .n_tokens = Tokens(n_tokens)};
  auto plan = (*cache)->reserve({&request, 1});
  if (!plan.ok()) return plan.status();
  if (Status status = (*cache)->append(*plan, 0, {k.data()}, {v.data()}); !status.ok()) return status;
  auto committed = (*cache)->commit(std::move(*plan));
  if (!committed.ok()) return committed.status();
  if (!committed->front().ok()) return committed->front();
  return Holder{std::move(*cache), started->id};
}

// One query's attention over what a part holds, and the log-sum-exp of its logits.
struct State {
  std::vector<float> out;  // [kQueryHeads, kHeadDim]
  std::vector<float> lse;  // [kQueryHeads]
};
Result<State> attend_over(const Holder& part, std::span<const float> q) {
  State state{std::vector<float>(kQueryHeads * kHeadDim), std::vector<float>(kQueryHeads)};
  const ReadRequest request{.sequence = part.sequence, .n_queries = Tokens(1)};  // at the last position: sees all
  auto plan = part.cache->plan_read({&request, 1});                              // stores nothing, needs no commit
  if (!plan.ok()) return plan.status();
  Scratch memory;
  const auto scratch = memory.get(part.cache->scratch_bytes(*plan, 1, kQueryHeads));
  if (!scratch.ok()) return scratch.status();
  const AttendArgs args{.plan = *plan,
                        .layer = 0,
                        .num_q_heads = kQueryHeads,
                        .q = q.data(),
                        .out = state.out.data(),
                        .lse = state.lse.data(),
                        .scratch = *scratch};
  if (Status status = part.cache->attend(args); !status.ok()) return status;
  if (Status status = part.cache->merge(args); !status.ok()) return status;
  return state;
}

}  // namespace

int main() {
  const int64_t width = kKvHeads * kHeadDim;
  const std::vector<float> k = random_values(1, (kFirst + kSecond) * width);
  const std::vector<float> v = random_values(2, (kFirst + kSecond) * width);
  const std::vector<float> q = random_values(3, kQueryHeads * kHeadDim);
  const std::span<const float> all_k(k), all_v(v);
  const auto whole = hold(all_k, all_v);
  const auto first = hold(all_k.first(kFirst * width), all_v.first(kFirst * width));
  const auto second = hold(all_k.subspan(kFirst * width), all_v.subspan(kFirst * width));
  if (!whole.ok() || !first.ok() || !second.ok()) return 1;

  const auto expected = attend_over(*whole, q), a = attend_over(*first, q), b = attend_over(*second, q);
  if (!expected.ok() || !a.ok() || !b.ok()) return 1;

  // The first two arguments become the state over both parts; one row a query head.
  State both = *a;
  pagedkv::merge_states(both.out.data(), both.lse.data(), b->out.data(), b->lse.data(), kQueryHeads, kHeadDim);

  float worst = 0;
  for (size_t i = 0; i < both.out.size(); ++i) worst = std::max(worst, std::fabs(both.out[i] - expected->out[i]));
  for (size_t i = 0; i < both.lse.size(); ++i) worst = std::max(worst, std::fabs(both.lse[i] - expected->lse[i]));
  std::printf("two parts and the whole differ by at most %g\n", double(worst));
  return worst < 1e-5f ? 0 : 1;
}
