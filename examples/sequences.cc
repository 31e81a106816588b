// Sequences: prompts that begin alike, namespaces, forks, tokens taken back and tokens on trial.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "pagedkv/cache.h"

using pagedkv::Blocks;
using pagedkv::Cache;
using pagedkv::PrefixMatch;
using pagedkv::PrefixReason;
using pagedkv::SequenceId;
using pagedkv::Started;
using pagedkv::Stats;
using pagedkv::Status;
using pagedkv::StepRequest;
using pagedkv::Tokens;

namespace {

constexpr int kLayers = 2;
constexpr int64_t kKvHeads = 2, kHeadDim = 64;

int failures = 0;

void expect(bool claim, const char* what) {
  if (claim) return;
  std::fprintf(stderr, "not so: %s\n", what);
  ++failures;
}

std::vector<int32_t> tokens(int32_t first, int32_t end) {
  std::vector<int32_t> list;
  for (int32_t token = first; token < end; ++token) list.push_back(token);
  return list;
}

std::unique_ptr<Cache> make_cache() {
  auto cache = Cache::create({.groups = {{.shape = {kKvHeads, kHeadDim, kHeadDim, {}}, .layers = {0, 1}}},
                              .block_size = Tokens(16),
                              .num_blocks = Blocks(64)});
  if (cache.ok()) return std::move(*cache);
  std::fprintf(stderr, "%s\n", cache.status().message().c_str());
  return nullptr;
}

// A step of one sequence without the attention; zeros stand in for the model's rows.
Status store(Cache& cache, SequenceId sequence, std::span<const int32_t> list,
             std::span<const Tokens> accepted = {}) {
  const StepRequest request{.sequence = sequence, .tokens = list};
  auto plan = cache.reserve({&request, 1});
  if (!plan.ok()) return plan.status();
  const std::vector<float> rows(list.size() * kKvHeads * kHeadDim);
  for (int layer = 0; layer < kLayers; ++layer) {
    if (Status status = cache.append(*plan, layer, {rows.data()}, {rows.data()}); !status.ok()) return status;
  }
  auto committed = cache.commit(std::move(*plan), accepted);
  return committed.ok() ? committed->front() : committed.status();
}

// What the cache holds of `prompt` is taken over, the rest is computed.
Started open(Cache& cache, std::span<const int32_t> prompt, const pagedkv::StartOptions& options = {}) {
  auto started = cache.start(prompt, options);
  expect(started.ok(), "a prompt can be opened");
  if (!started.ok()) return {};
  expect(store(cache, started->id, prompt.subspan(started->reused.n)).ok(), "its rest can be stored");
  return *started;
}

void share(Cache& cache) {
  const std::vector<int32_t> prompt = tokens(0, 100);  // six blocks of 16, and 4 tokens
  const Started first = open(cache, prompt);
  expect(first.reused == Tokens(0) && first.reason == PrefixReason::kNew, "nothing was known");

  // Again, while the first one lives: whole blocks are shared, the rest is copied. The last token is computed.
  const Started again = open(cache, prompt);
  expect(again.reused == Tokens(99) && again.reason == PrefixReason::kLastToken, "all but the last token");

  // The first 40 tokens are the same: two blocks are shared, half of the third is copied.
  std::vector<int32_t> other = tokens(0, 40);
  for (const int32_t token : tokens(500, 560)) other.push_back(token);
  const Started branch = open(cache, other);
  expect(branch.reused == Tokens(40) && branch.reason == PrefixReason::kNew, "as far as they are equal");

  // Another tenant's prompt of the same tokens meets nothing.
  const Started stranger = open(cache, prompt, {.name_space = "tenant b"});
  expect(stranger.reused == Tokens(0) && stranger.reason == PrefixReason::kNew, "namespaces do not share");
  const Started alone = open(cache, prompt, {.reuse = false, .store = false});
  expect(alone.reused == Tokens(0) && alone.reason == PrefixReason::kOff, "sharing may be off for one sequence");

  const Stats stats = cache.stats();
  expect(stats.hit_tokens == 99 + 40, "tokens that were not computed again");
  for (const auto& [reason, n_tokens] : stats.hits_by_reason)
    std::printf("%s: %lld tokens\n", reason.c_str(), static_cast<long long>(n_tokens));

  for (const Started& each : {first, again, branch, stranger, alone})
    expect(cache.release(each.id).ok(), "a sequence can be released");
  expect(cache.stats().bytes_in_use == 0, "nobody holds a block");
  expect(cache.stats().blocks_cached > 0, "keyed blocks stay until room is needed");
}

void wait(Cache& cache) {
  const std::vector<int32_t> prompt = tokens(0, 100);

  // A request that waits: its prompt is hashed once, the question is asked as often as you like.
  PrefixMatch match = cache.match(prompt);
  expect(match.keys.size() == 6 && match.cached == Tokens(96), "six whole blocks, cached by share()");

  cache.clear_cached();
  match = cache.match(prompt, std::move(match));
  expect(match.cached == Tokens(0), "nothing is cached now");
}

void fork(Cache& cache) {
  const SequenceId parent = open(cache, tokens(0, 40)).id;
  const auto forked = cache.fork(parent);  // takes no block
  expect(forked.ok(), "a sequence can be forked");
  if (!forked.ok()) return;
  const SequenceId child = *forked;
  expect(cache.length(child).value() == Tokens(40), "the child is as long");
  expect(cache.stats().blocks_shared == 3, "and holds the same three blocks");

  const int64_t copies = cache.stats().copies;
  expect(store(cache, child, tokens(900, 901)).ok(), "the child goes its own way");
  expect(cache.stats().copies == copies + 1, "its last block was copied first");
  expect(store(cache, parent, tokens(700, 701)).ok(), "the parent goes on");
  expect(cache.stats().copies == copies + 1, "alone in its block now: no copy");
  expect(cache.stats().blocks_shared == 2, "the whole blocks are still shared");

  for (const SequenceId id : {parent, child}) expect(cache.release(id).ok(), "both can be released");
}

void take_back(Cache& cache) {
  const SequenceId sequence = open(cache, tokens(2000, 2040)).id;

  // Tokens on trial: eight drafted ones go through the model in one step, the first three are right.
  const Tokens accepted[] = {Tokens(3)};
  expect(store(cache, sequence, tokens(2040, 2048), accepted).ok(), "a step may be accepted in part");
  expect(cache.length(sequence).value() == Tokens(43), "the sequence grew by what was accepted");

  // An edited conversation: back to token 20, then on with other tokens.
  expect(cache.truncate(sequence, Tokens(20)).ok(), "a sequence can be shortened");
  expect(cache.blocks_held(sequence).value() == Blocks(2), "the blocks past the end went back");
  expect(store(cache, sequence, tokens(3000, 3010)).ok(), "and continued");
  expect(cache.length(sequence).value() == Tokens(30), "20 old tokens, 10 new ones");

  expect(cache.release(sequence).ok(), "it can be released");
}

}  // namespace

int main() {
  const std::unique_ptr<Cache> cache = make_cache();
  if (!cache) return 1;
  share(*cache);
  wait(*cache);
  fork(*cache);
  take_back(*cache);
  expect(cache->verify().ok(), "every invariant holds");
  return failures == 0 ? 0 : 1;
}
