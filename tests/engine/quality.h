// How well logits predict a text, and how far two sets of them agree.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tests/engine/oracle.h"

namespace pagedkv::engine {

// Takes the logits of a text in order, as many rows at a time as there is memory for.
class Quality {
 public:
  // `tokens` must outlive it; `width` is the vocabulary's size.
  Quality(std::span<const int32_t> tokens, int64_t width) : tokens_(tokens), width_(size_t(width)) {}

  void add(std::span<const float> logits) {
    for (; !logits.empty(); logits = logits.subspan(width_)) {
      const auto row = logits.first(width_);
      best_.push_back(argmax(row));
      if (best_.size() < tokens_.size()) log_p_.push_back(log_probability(row, tokens_[best_.size()]));
    }
  }

  double perplexity() const {
    double sum = 0;
    for (double x : log_p_) sum -= x;
    return std::exp(sum / double(log_p_.size()));
  }

  // Per cent of positions where both name the same next token.
  double agreement(const Quality& other) const {
    double same = 0;
    for (size_t i = 0; i < best_.size(); ++i) same += best_[i] == other.best_[i];
    return 100 * same / double(best_.size());
  }

  // Standard error of the mean difference in log-probability, which for small values is that of the perplexities'
  // ratio.
  double standard_error(const Quality& other) const {
    double sum = 0, squares = 0;
    const auto n = double(log_p_.size());
    for (size_t i = 0; i < log_p_.size(); ++i) {
      const double d = log_p_[i] - other.log_p_[i];
      sum += d;
      squares += d * d;
    }
    return std::sqrt((squares / n - sum / n * (sum / n)) / n);
  }

 private:
  std::span<const int32_t> tokens_;
  size_t width_;
  std::vector<double> log_p_;  // of the token that really follows
  std::vector<int64_t> best_;  // most likely next token at each position
};

// Runs 2,048 tokens of the text through libllama, through its flash kernel, and through the engine on one thread,
// all with K and V as f16 and `chunk` tokens at a time, and expects of ours what smollm2_test.cc explains.
void expect_to_predict_as_well_as_libllama(const std::string& model, const std::string& text, int chunk);

}  // namespace pagedkv::engine
