// A model without weights that is honest about the cache: every token is stored as a row of K and read back from
// the blocks in each step, so an answer is right only if block tables, sharing, forks and preemption are.
//
// Tokens 0..255 are bytes. The prompt says what is answered:
//   say:TEXT     TEXT (up to a newline or the end), then the end
//   loop:TEXT    TEXT over and over
//   flood:       pieces of 64 KiB for ever
//   stall:       the first step of it takes Options::stall_seconds
//   crash:       the step throws
//   anything else: letters that depend on every token before, for ever
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/step_model.h"
#include "engine/tier_traffic.h"
#include "pagedkv/cache.h"

namespace pagedkv::engine {

inline constexpr int32_t kEndOfPrompt = 256, kEndOfAnswer = 257, kBigPiece = 258, kScriptedVocabulary = 259;

class ScriptedText : public Text {
 public:
  int64_t vocab_size() const override { return kScriptedVocabulary; }
  // add_special: with the mark that ends a prompt.
  Result<std::vector<int32_t>> tokenize(std::string_view text, bool add_special, bool) const override {
    if (const int64_t at = find_invalid_utf8(text); at >= 0)
      return invalid_argument("[tokenize] the text is not valid UTF-8 at byte " + std::to_string(at));
    std::vector<int32_t> tokens;
    for (const unsigned char c : text) tokens.push_back(c);
    if (add_special) tokens.push_back(kEndOfPrompt);
    return tokens;
  }
  std::string piece(int32_t token) const override {
    if (token == kBigPiece) return std::string(65536, 'x');
    return token < 256 ? std::string(1, char(token)) : "";
  }
  int64_t longest_piece() const override { return 4; }  // that of one with longer tokens than its own
  bool is_end(int32_t token) const override { return token == kEndOfAnswer; }
  int32_t bos() const override { return -1; }
  bool has_chat_template() const override { return true; }
  std::optional<std::string> default_system() const override { return std::nullopt; }
  Result<std::string> apply_chat_template(std::span<const ChatMessage> messages) const override {
    std::string text;
    for (const ChatMessage& message : messages) text += message.role + "> " + message.content + "\n";
    return text;
  }
  Result<std::vector<int32_t>> tokenize_chat(std::span<const ChatMessage> messages) const override {
    return tokenize(*apply_chat_template(messages), true, true);
  }
  Result<std::unique_ptr<Sampler>> make_sampler(const SamplingOptions& options) const override {
    if (Status status = check_sampling(options); !status.ok()) return status;
    class Greedy : public Sampler {
     public:
      explicit Greedy(std::string grammar) : grammar_(std::move(grammar)) {}
      Result<int32_t> sample(std::span<const float> logits) override {
        if (++n_drawn_ > 3 && grammar_ == "dead end") return invalid_argument("[grammar] no token goes on");
        if (n_drawn_ > 3 && grammar_ == "throws") throw std::runtime_error("scripted sampler");
        return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
      }
      void accept(int32_t) override {}

     private:
      const std::string grammar_;  // "dead end" and "throws": what happens instead of the fourth token
      int n_drawn_ = 0;
    };
    return std::unique_ptr<Sampler>(std::make_unique<Greedy>(options.grammar));
  }
};

struct ScriptedOptions {
  int64_t block_size = 16;
  int64_t num_blocks = 64;
  int64_t context = 512;
  double step_seconds = 0;   // every step takes so long,
  double token_seconds = 0;  // and so long for each of its tokens
  double stall_seconds = 60;
  std::shared_ptr<Tier> tier = nullptr;
  std::chrono::milliseconds patience{600000};  // with the tier
};

class ScriptedModel : public StepModel {
 public:
  static std::unique_ptr<ScriptedModel> make(const ScriptedOptions& options) {
    GroupSpec group{
        .shape = {.num_kv_heads = 1, .head_dim_k = 16, .head_dim_v = 16, .formats = {Format::kF32, Format::kF32}}};
    group.layers.push_back(0);
    auto cache = Cache::create({.groups = {group},
                                .block_size = Tokens(options.block_size),
                                .num_blocks = Blocks(options.num_blocks),
                                .dynamic = false,
                                .max_context = Tokens(options.context),
                                .max_sequences = 64,
                                .most_keyed = options.tier == nullptr ? 0 : 1024});
    if (!cache.ok()) throw std::runtime_error(cache.status().message());
    return std::unique_ptr<ScriptedModel>(new ScriptedModel(options, std::move(*cache)));
  }

  const Text& text() const override { return text_; }
  Cache& cache() override { return *cache_; }
  Tokens context() const override { return Tokens(options_.context); }
  TierTraffic* tier() override { return tier_.get(); }

  Result<StepOutput> step(std::span<const StepInput> inputs) override {
    std::vector<StepRequest> requests;
    std::vector<float> rows;
    int64_t n_tokens = 0;
    for (const StepInput& input : inputs) {
      requests.push_back({.sequence = input.sequence, .tokens = input.tokens});
      for (const int32_t token : input.tokens) {
        rows.resize(rows.size() + 16, 0.0f);
        rows[rows.size() - 16] = float(token);
        ++n_tokens;
      }
    }
    auto plan = cache_->reserve(requests);
    if (!plan.ok()) return plan.status();
    if (Status s = cache_->append(*plan, 0, {.data = rows.data()}, {.data = rows.data()}); !s.ok()) return s;
    auto statuses = cache_->commit(std::move(*plan));
    if (!statuses.ok()) return statuses.status();
    ++steps;
    tokens += n_tokens;
    largest_step = std::max(largest_step.load(), n_tokens);

    StepOutput out;
    out.statuses = std::move(*statuses);
    logits_.assign(inputs.size() * kScriptedVocabulary, 0.0f);
    double seconds = options_.step_seconds + options_.token_seconds * double(n_tokens);
    for (size_t i = 0; i < inputs.size(); ++i) {
      out.first_row.push_back(int64_t(i));
      const auto dense = cache_->read_dense(inputs[i].sequence, 0);
      if (!dense.ok()) return dense.status();
      std::vector<int32_t> stored;
      for (size_t at = 0; at < dense->k.size(); at += 16) stored.push_back(int32_t(dense->k[at]));
      if (std::string_view(prompt_of(stored)).find("stall:") != std::string::npos && !stalled_.exchange(true))
        seconds += options_.stall_seconds;
      logits_[i * kScriptedVocabulary + size_t(next(stored))] = 10;
    }
    held_.wait(true);
    for (double left = seconds; left > 0 && !hurry; left -= 0.01)
      std::this_thread::sleep_for(std::chrono::duration<double>(std::min(left, 0.01)));
    out.logits = logits_;
    return out;
  }

  // What the model answers to these tokens next.
  static int32_t next(const std::vector<int32_t>& tokens) {
    const std::string prompt = prompt_of(tokens);
    const auto mark = std::find(tokens.begin(), tokens.end(), kEndOfPrompt);
    const auto n_said = size_t(mark == tokens.end() ? 0 : tokens.end() - mark - 1);
    const auto rest = [&](const char* word) -> std::optional<std::string> {
      const size_t at = prompt.rfind(word);
      if (at == std::string::npos) return std::nullopt;
      const std::string text = prompt.substr(at + std::string_view(word).size());
      return text.substr(0, text.find('\n'));
    };
    if (prompt.find("crash:") != std::string::npos) throw std::runtime_error("scripted crash");
    if (rest("flood:")) return kBigPiece;
    if (const auto text = rest("say:"))
      return n_said < text->size() ? static_cast<unsigned char>((*text)[n_said]) : kEndOfAnswer;
    if (const auto text = rest("loop:"); text && !text->empty())
      return static_cast<unsigned char>((*text)[n_said % text->size()]);
    uint64_t hash = 1469598103934665603u;
    for (const int32_t token : tokens) hash = (hash ^ uint64_t(token)) * 1099511628211u;
    return 'a' + int32_t((hash >> 33) % 26);
  }
  // The answer to a prompt without directives, alone.
  static std::string answer(std::vector<int32_t> prompt, int64_t n) {
    std::string text;
    for (; n > 0; --n) {
      prompt.push_back(next(prompt));
      text += char(prompt.back());
    }
    return text;
  }

  // No step ends until `release`: what a test submits meanwhile is there at one moment, however slow its thread is.
  void hold() { held_ = true; }
  void release() {
    held_ = false;
    held_.notify_all();
  }

  std::atomic<int64_t> steps{0}, tokens{0}, largest_step{0};
  std::atomic<bool> hurry{false};  // no more waiting

 private:
  ScriptedModel(const ScriptedOptions& options, std::unique_ptr<Cache> cache)
      : options_(options), cache_(std::move(cache)) {
    if (options.tier != nullptr)
      tier_ = std::make_unique<TierTraffic>(*cache_, TierTrafficOptions{.tier = options.tier,
                                                                        .min_prefix = Tokens(options.block_size),
                                                                        .patience = options.patience,
                                                                        .identity = PrefixKey{}});
  }
  static std::string prompt_of(const std::vector<int32_t>& tokens) {
    std::string text;
    for (const int32_t token : tokens) {
      if (token == kEndOfPrompt) break;
      if (token < 256) text += char(token);
    }
    return text;
  }

  const ScriptedOptions options_;
  std::atomic<bool> held_{false};
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<TierTraffic> tier_;  // holds blocks of the cache
  ScriptedText text_;
  std::vector<float> logits_;
  std::atomic<bool> stalled_{false};
};

}  // namespace pagedkv::engine
