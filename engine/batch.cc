#include "engine/batch.h"

#include <algorithm>

namespace pagedkv::engine {
namespace {

constexpr int64_t kLeastChunk = 16;  // prompt tokens of a step, however short it is to be
constexpr double kSmoothing = 0.2;   // weight of the last step in the averages

void blend(double& average, double value) {
  average = average == 0 ? value : average + kSmoothing * (value - average);
}

}  // namespace

Batcher::Batcher(Tokens max_step_tokens, double max_step_seconds)
    : max_tokens_(max_step_tokens.n), max_seconds_(max_step_seconds) {}

std::vector<Share> Batcher::choose(std::span<const int64_t> pending) {
  std::vector<Share> step;
  std::vector<size_t> answers;
  for (size_t i = 0; i < pending.size(); ++i)
    if (pending[i] == 1) answers.push_back(i);
  int64_t left = max_tokens_;
  const auto n_answers = std::min<int64_t>(std::ssize(answers), left);
  for (int64_t i = 0; i < n_answers; ++i)
    step.push_back({answers[(first_answer_ + size_t(i)) % answers.size()], 1});
  first_answer_ = n_answers < std::ssize(answers) ? first_answer_ + size_t(n_answers) : 0;
  left -= n_answers;
  // Nobody waits for the next token of a prompt: alone, prompts take all there is.
  if (n_answers > 0 && max_seconds_ > 0 && seconds_per_prompt_token_ > 0) {
    const double room = (max_seconds_ - decode_seconds_) / seconds_per_prompt_token_;
    left = std::min(left, std::max(kLeastChunk, int64_t(room)));
  }
  for (size_t i = 0; i < pending.size() && left > 0; ++i) {
    if (pending[i] == 1) continue;
    step.push_back({i, std::min(left, pending[i])});
    left -= step.back().n_tokens;
  }
  return step;
}

void Batcher::learn(std::span<const Share> step, double seconds) {
  int64_t n_prompt = 0;
  for (const Share& share : step) n_prompt += share.n_tokens > 1 ? share.n_tokens : 0;
  if (n_prompt == 0) {
    blend(decode_seconds_, seconds);
  } else if (n_prompt >= kLeastChunk) {  // of fewer, the step's own cost would be taken for theirs
    const double of_answers = step.size() > 1 && step[0].n_tokens == 1 ? decode_seconds_ : 0;
    blend(seconds_per_prompt_token_, std::max(seconds - of_answers, seconds / 4) / double(n_prompt));
  }
}

}  // namespace pagedkv::engine
