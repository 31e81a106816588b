// With text.cc, the engine's only file that knows libllama.
#include "engine/sampler.h"

#include <llama.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <optional>
#include <random>
#include <unordered_map>
#include <utility>

namespace pagedkv::engine {
namespace {

// Below this a division by the temperature only risks overflow: the best token's share is 1 but for exact ties.
constexpr float kGreedyBelow = 1e-6f;

// Up to this many likeliest tokens are chosen here, in one pass over the logits, which libllama's sort of the whole
// vocabulary takes ten times as long for.
constexpr int kFewCandidates = 256;

// Seeds of 32 bits draw what libllama's sampler draws; its one seed for "any", and longer ones, are seeds like
// others.
std::mt19937 generator(uint64_t seed) {
  if (seed < LLAMA_DEFAULT_SEED) return std::mt19937(uint32_t(seed));
  std::seed_seq words{uint32_t(seed), uint32_t(seed >> 32)};
  return std::mt19937(words);
}

// The tokens that grammar and vocabulary leave.
class GrammarFilter {
 public:
  GrammarFilter(const Vocabulary& vocabulary, std::shared_ptr<const Grammar> grammar)
      : vocabulary_(vocabulary), state_(std::move(grammar)) {}

  bool fits(int32_t token) {
    return vocabulary_.is_end(token) ? state_.complete() : state_.fits(vocabulary_.piece(token));
  }
  std::vector<int32_t> fitting() {
    std::vector<int32_t> tokens = state_.fitting(vocabulary_.sorted_pieces());
    std::erase_if(tokens, [this](int32_t token) { return vocabulary_.is_end(token); });
    if (state_.complete()) {
      const auto& ends = vocabulary_.end_tokens();
      tokens.insert(tokens.end(), ends.begin(), ends.end());
    }
    return tokens;
  }
  // Requires: it fits.
  void accept(int32_t token) {
    if (!vocabulary_.is_end(token)) state_.advance(vocabulary_.piece(token));
    ++n_tokens_;
  }
  Status dead_end() const {
    const std::string after = "after " + std::to_string(n_tokens_) + (n_tokens_ == 1 ? " token" : " tokens");
    if (state_.exhausted())
      return invalid_argument("[grammar] the answer cannot be followed any more " + after +
                              ": the grammar is too ambiguous for it");
    return invalid_argument("[grammar] no token of this model's vocabulary goes on " + after +
                            ": the grammar asks for text that the vocabulary cannot spell");
  }

 private:
  const Vocabulary& vocabulary_;
  GrammarState state_;
  int64_t n_tokens_ = 0;
};

class VocabularySampler : public Sampler {
 public:
  VocabularySampler(const Vocabulary& vocabulary, const SamplingOptions& options,
                    std::shared_ptr<const Grammar> grammar)
      : options_(options), greedy_(options.temperature < kGreedyBelow), random_(generator(options.seed)) {
    if (grammar) grammar_.emplace(vocabulary, std::move(grammar));
    if (greedy_) return;
    auto params = llama_sampler_chain_default_params();
    params.no_perf = true;
    chain_.reset(llama_sampler_chain_init(params));
    // Top-k comes first: what follows then handles k tokens instead of the whole vocabulary.
    if (options.top_k > 0) add(llama_sampler_init_top_k(options.top_k));
    if (options.top_p < 1) add(llama_sampler_init_top_p(options.top_p, 1));
    if (options.min_p > 0) add(llama_sampler_init_min_p(options.min_p, 1));
    add(llama_sampler_init_temp(options.temperature));
  }

  Result<int32_t> sample(std::span<const float> logits) override {
    if (changes_logits()) {
      changed.assign(logits.begin(), logits.end());
      change(changed);
      logits = changed;
    }
    // What sorts below takes for granted that each value compares with each other one.
    bool comparable = true;
    for (const float logit : logits) comparable &= logit == logit;
    if (!comparable) return Status(Code::kNotFinite, "[sampling] a logit is NaN");

    auto token = choose(logits);
    // Few tokens of a vocabulary fit a grammar, and asking it about each takes long: most draws fit as they are.
    if (token.ok() && grammar_ && !grammar_->fits(*token)) {
      const std::vector<int32_t> fitting = grammar_->fitting();
      candidates.clear();
      for (const int32_t one : fitting) candidates.push_back({one, logits[size_t(one)], 0});
      if (candidates.empty()) return grammar_->dead_end();
      token = greedy_ ? best_candidate() : draw(false);
    }
    if (!token.ok()) return token;
    if (grammar_) grammar_->accept(*token);
    ++drawn_[*token];
    accept(*token);
    return token;
  }

  void accept(int32_t token) override {
    if (options_.repeat_penalty == 1 || options_.repeat_last_n == 0) return;
    if (std::ssize(recent_) == options_.repeat_last_n) {
      const auto oldest = seen_.find(recent_.front());
      if (--oldest->second == 0) seen_.erase(oldest);
      recent_.pop_front();
    }
    recent_.push_back(token);
    ++seen_[token];
  }

 private:
  void add(llama_sampler* sampler) { llama_sampler_chain_add(chain_.get(), sampler); }

  bool changes_logits() const {
    return !options_.logit_bias.empty() || !seen_.empty() ||
           (!drawn_.empty() && (options_.presence_penalty != 0 || options_.frequency_penalty != 0));
  }
  // The repeat penalty is libllama's, term by term; its own sampler looks every token of the vocabulary up in a
  // hash map, this visits the few that were seen.
  void change(std::span<float> logits) const {
    const auto at = [&](int32_t token) -> float* {
      return token >= 0 && token < std::ssize(logits) ? &logits[size_t(token)] : nullptr;
    };
    for (const auto& [token, bias] : options_.logit_bias)
      if (float* logit = at(token)) *logit += bias;
    for (const auto& [token, count] : seen_)
      if (float* logit = at(token))
        *logit = *logit <= 0 ? *logit * options_.repeat_penalty : *logit / options_.repeat_penalty;
    for (const auto& [token, count] : drawn_)
      if (float* logit = at(token)) *logit -= options_.presence_penalty + options_.frequency_penalty * float(count);
  }

  Result<int32_t> choose(std::span<const float> logits) {
    if (greedy_)  // the first of equals
      return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
    if (options_.top_k > 0 && options_.top_k <= kFewCandidates) {
      likeliest(logits, size_t(options_.top_k));
      return draw(true);
    }
    candidates.resize(logits.size());
    for (size_t i = 0; i < logits.size(); ++i) candidates[i] = {llama_token(i), logits[i], 0};
    return draw(false);
  }

  // The k likeliest tokens, likeliest first; of equals the first.
  void likeliest(std::span<const float> logits, size_t k) {
    const auto likelier = [](const llama_token_data& a, const llama_token_data& b) {
      return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
    candidates.clear();  // a heap with the least likely on top
    float least = -INFINITY;
    for (size_t i = 0; i < logits.size(); ++i) {
      if (candidates.size() == k) {
        if (!(logits[i] > least)) continue;
        std::pop_heap(candidates.begin(), candidates.end(), likelier);
        candidates.pop_back();
      }
      candidates.push_back({llama_token(i), logits[i], 0});
      std::push_heap(candidates.begin(), candidates.end(), likelier);
      if (candidates.size() == k) least = candidates.front().logit;
    }
    std::sort_heap(candidates.begin(), candidates.end(), likelier);
  }

  int32_t best_candidate() const {
    return std::max_element(candidates.begin(), candidates.end(),
                            [](const auto& a, const auto& b) { return a.logit < b.logit; })
        ->id;
  }

  // One of the candidates, by their probability after the chain. Source: libllama's `dist` sampler.
  Result<int32_t> draw(bool sorted) {
    llama_token_data_array array{candidates.data(), candidates.size(), -1, sorted};
    llama_sampler_apply(chain_.get(), &array);
    const std::span<llama_token_data> left(array.data, array.size);
    float most = -INFINITY;
    for (const llama_token_data& c : left) most = std::max(most, c.logit);
    if (left.empty() || !std::isfinite(most))
      return Status(Code::kNotFinite, "[sampling] no token has a finite logit to be drawn by");
    double sum = 0;
    for (llama_token_data& c : left) sum += c.p = std::exp(c.logit - most);
    const double target = sum * std::uniform_real_distribution<double>(0, 1)(random_);
    double passed = 0;
    for (const llama_token_data& c : left)
      if ((passed += c.p) >= target) return c.id;
    return left.back().id;
  }

  const SamplingOptions options_;
  const bool greedy_;
  std::mt19937 random_;
  struct Free {
    void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
  };
  std::unique_ptr<llama_sampler, Free> chain_;  // null when greedy
  std::optional<GrammarFilter> grammar_;        // none when any answer will do
  // Shared by all samplers of a thread: as long as the vocabulary, and meaningless between two draws.
  static thread_local std::vector<llama_token_data> candidates;
  static thread_local std::vector<float> changed;  // logits with bias and penalties
  std::deque<int32_t> recent_;                     // the last repeat_last_n tokens
  std::unordered_map<int32_t, int> seen_;          // how often each is in recent_; never 0
  std::unordered_map<int32_t, int> drawn_;         // how often the answer has each
};

thread_local std::vector<llama_token_data> VocabularySampler::candidates;
thread_local std::vector<float> VocabularySampler::changed;

}  // namespace

Result<std::unique_ptr<Sampler>> make_vocabulary_sampler(const Vocabulary& vocabulary,
                                                         const SamplingOptions& options) {
  std::shared_ptr<const Grammar> grammar;
  if (!options.grammar.empty()) {
    auto parsed = Grammar::parse(options.grammar);
    if (!parsed.ok()) return parsed.status();
    grammar = std::move(*parsed);
  }
  return std::unique_ptr<Sampler>(std::make_unique<VocabularySampler>(vocabulary, options, std::move(grammar)));
}

}  // namespace pagedkv::engine
