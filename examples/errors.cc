// What can go wrong in a step, how the caller learns of it, and what is left behind.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string_view>
#include <vector>

#include "pagedkv/cache.h"
#include "pagedkv/log.h"

using pagedkv::Blocks;
using pagedkv::Cache;
using pagedkv::Code;
using pagedkv::Format;
using pagedkv::SequenceId;
using pagedkv::Status;
using pagedkv::StepRequest;
using pagedkv::Tokens;

namespace {

constexpr int64_t kKvHeads = 2, kHeadDim = 64;

int failures = 0;

void expect(bool claim, const char* what) {
  if (claim) return;
  std::fprintf(stderr, "not so: %s\n", what);
  ++failures;
}

void show(const Status& status) {
  std::printf("%s: %s\n", pagedkv::code_name(status.code()), status.message().c_str());
}

// One step of `n_tokens` rows for each sequence; K of the first row is `first`.
Status store(Cache& cache, const std::vector<SequenceId>& sequences, int64_t n_tokens, float first = 0) {
  std::vector<StepRequest> requests;
  for (const SequenceId id : sequences) requests.push_back({.sequence = id, .n_tokens = Tokens(n_tokens)});
  auto plan = cache.reserve(requests);
  if (!plan.ok()) return plan.status();

  std::vector<float> k(plan->n_tokens() * kKvHeads * kHeadDim), v = k;
  k[0] = first;
  if (Status status = cache.append(*plan, 0, {k.data()}, {v.data()}); !status.ok()) return status;
  auto committed = cache.commit(std::move(*plan));
  if (!committed.ok()) return committed.status();
  for (const Status& sequence : *committed) {
    if (!sequence.ok()) return sequence;  // of this sequence alone; the others have grown
  }
  return Status();
}

void no_room(Cache& cache, SequenceId a, SequenceId b) {
  expect(store(cache, {a, b}, 32).ok(), "four blocks are there, and taken");

  Status status = store(cache, {a}, 20);
  if (status.code() == Code::kCapacity) {  // nothing was changed: make room and ask again, or wait
    show(status);
    expect(cache.release(b).ok(), "the other one may go");
    status = store(cache, {a}, 20);
  }
  expect(status.ok(), "now there is room");

  status = cache.length(b).status();
  expect(status.code() == Code::kStale, "its handle is refused from now on");
  show(status);
}

void not_finite(Cache& cache, SequenceId a, SequenceId b) {
  const Status status = store(cache, {a, b}, 5, NAN);  // in the rows of a
  expect(status.code() == Code::kNotFinite, "commit says so");
  show(status);
  expect(cache.length(a).value() == Tokens(0), "a stayed as it was");
  expect(cache.length(b).value() == Tokens(5), "b has grown");
  expect(store(cache, {a}, 5).ok(), "a can go on");
}

void not_possible() {
  auto cache = Cache::create(
      {.groups = {{.shape = {kKvHeads, 70, 70, {.k = Format::kQ6, .v = Format::kQ6}}, .layers = {0}}}});
  expect(cache.status().code() == Code::kInvalidArgument, "rows of 70 cannot be stored as q6");
  show(cache.status());
}

}  // namespace

int main() {
  // Notices (a clamped limit, a slow path) go nowhere unless you say where.
  pagedkv::set_log_sink(
      [](std::string_view message) { std::fprintf(stderr, "%.*s\n", int(message.size()), message.data()); });

  for (const auto scene : {no_room, not_finite}) {
    auto cache = Cache::create({.groups = {{.shape = {kKvHeads, kHeadDim, kHeadDim, {}}, .layers = {0}}},
                                .block_size = Tokens(16),
                                .num_blocks = Blocks(4),
                                .dynamic = false});
    if (!cache.ok()) return show(cache.status()), 1;
    const auto a = (*cache)->start({}), b = (*cache)->start({});
    if (!a.ok() || !b.ok()) return 1;
    scene(**cache, a->id, b->id);
    expect((*cache)->verify().ok(), "every invariant holds");
  }
  not_possible();
  return failures == 0 ? 0 : 1;
}
