// Uses the installed library the way an engine does: one sequence, one step.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "pagedkv/cache.h"

using namespace pagedkv;  // NOLINT: twenty lines

int main() {
  auto cache =
      Cache::create({.groups = {{.shape = {.num_kv_heads = 2, .head_dim_k = 8, .head_dim_v = 8}, .layers = {0}}},
                     .num_blocks = Blocks(4)});
  if (!cache.ok()) return std::fprintf(stderr, "%s\n", cache.status().message().c_str()), 1;
  const std::vector<int32_t> prompt = {1, 2, 3, 4, 5};
  auto sequence = (*cache)->start(prompt);
  if (!sequence.ok()) return 2;
  const StepRequest request{.sequence = sequence->id, .tokens = prompt};
  auto plan = (*cache)->reserve({&request, 1});
  if (!plan.ok() || plan->n_tokens() != 5) return 3;
  auto statuses = (*cache)->commit(std::move(*plan));
  if (!statuses.ok() || !statuses->front().ok()) return 4;
  if ((*cache)->length(sequence->id).value() != Tokens(5)) return 5;
  std::printf("installed pagedkv holds %d tokens\n", 5);
  return 0;
}
