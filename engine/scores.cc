#include "engine/scores.h"

#include <algorithm>
#include <cmath>

namespace pagedkv::engine {
namespace {

std::vector<TokenScore> best_scores(std::span<const float> logits, int64_t n, float normalizer) {
  std::vector<TokenScore> best;
  const auto less = [](const TokenScore& a, const TokenScore& b) { return a.logprob > b.logprob; };  // a min-heap
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::ssize(best) == n && (n == 0 || logits[i] <= best.front().logprob)) continue;
    if (std::ssize(best) == n) {
      std::pop_heap(best.begin(), best.end(), less);
      best.pop_back();
    }
    best.push_back({int32_t(i), logits[i]});
    std::push_heap(best.begin(), best.end(), less);
  }
  std::sort_heap(best.begin(), best.end(), less);
  for (TokenScore& score : best) score.logprob -= normalizer;
  return best;
}

}  // namespace

ScoredToken scores_of(std::span<const float> logits, int32_t token, int64_t n_top) {
  const float top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - top);
  const float normalizer = top + float(std::log(sum));
  return {.drawn = {token, logits[size_t(token)] - normalizer}, .top = best_scores(logits, n_top, normalizer)};
}

}  // namespace pagedkv::engine
