// Log-probabilities of drawn tokens and of those beside them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace pagedkv::engine {

// A log-probability of the model's own distribution, before penalties, bias, temperature and grammar.
struct TokenScore {
  int32_t token = -1;
  float logprob = 0;
};
struct ScoredToken {
  TokenScore drawn;
  std::vector<TokenScore> top;  // likeliest first
};

// Of the token that was drawn from these logits, and the n_top likeliest.
//   logits  [vocab_size]
// Requires: 0 <= token < vocab_size, n_top >= 0. Any thread.
ScoredToken scores_of(std::span<const float> logits, int32_t token, int64_t n_top);

}  // namespace pagedkv::engine
