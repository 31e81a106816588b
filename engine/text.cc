// The one file of the engine that knows libllama.
#include "engine/text.h"

#include <llama.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "pagedkv/log.h"

namespace pagedkv::engine {
namespace {

// --- libllama's log ----------------------------------------------------------------------------------------------
// libllama writes pages to stderr. Only its errors are passed on: the first one of a load becomes part of the
// load's Status, any other is a notice.
thread_local std::string* load_error = nullptr;  // where a load in progress on this thread wants it

void pass_on_error(ggml_log_level level, const char* text, void* /*user_data*/) {
  if (level != GGML_LOG_LEVEL_ERROR) return;
  std::string_view line = text;
  while (line.ends_with('\n')) line.remove_suffix(1);
  if (load_error == nullptr) {
    notice(std::string("libllama: ").append(line));
  } else if (load_error->empty()) {
    *load_error = line;
  }
}

void start_libllama() {
  static std::once_flag once;
  std::call_once(once, [] {
    llama_log_set(pass_on_error, nullptr);
    llama_backend_init();
  });
}

// --- sampling ----------------------------------------------------------------------------------------------------
template <class Number>
Status check_range(const char* option, Number value, Number low, Number high) {
  if (value >= low && value <= high) return Status();  // false for NaN
  std::ostringstream message;
  message << "[sampling] " << option << " is " << value << ", allowed are " << low << " to " << high;
  return invalid_argument(std::move(message).str());
}

// Below this a division by the temperature only risks overflow: the best token's share is 1 but for exact ties.
constexpr float kGreedyBelow = 1e-6f;

// Up to this many likeliest tokens are chosen here, in one pass over the logits, which libllama's sort of the whole
// vocabulary takes ten times as long for.
constexpr int kFewCandidates = 256;

class LlamaSampler : public Sampler {
 public:
  LlamaSampler(const llama_vocab* vocab, const SamplingOptions& options)
      : options_(options), greedy_(options.temperature < kGreedyBelow) {
    if (!options.grammar.empty())
      grammar_.reset(llama_sampler_init_grammar(vocab, options.grammar.c_str(), "root"));
    if (greedy_) return;
    auto params = llama_sampler_chain_default_params();
    params.no_perf = true;
    chain_.reset(llama_sampler_chain_init(params));
    // Top-k comes first: what follows then handles k tokens instead of the whole vocabulary.
    if (options.top_k > 0) add(llama_sampler_init_top_k(options.top_k));
    if (options.top_p < 1) add(llama_sampler_init_top_p(options.top_p, 1));
    if (options.min_p > 0) add(llama_sampler_init_min_p(options.min_p, 1));
    add(llama_sampler_init_temp(options.temperature));
    // One seed means "any" to libllama; here every seed is repeatable.
    add(llama_sampler_init_dist(options.seed == LLAMA_DEFAULT_SEED ? LLAMA_DEFAULT_SEED - 1 : options.seed));
  }

  bool has_grammar() const { return grammar_ != nullptr; }

  int32_t sample(std::span<const float> logits) override {
    if (changes_logits()) {
      changed.assign(logits.begin(), logits.end());
      change(changed);
      logits = changed;
    }
    int32_t token = choose(logits);
    if (grammar_) {
      // Few tokens of a vocabulary fit a grammar, and asking it about each takes long: most draws fit as they are.
      if (!fits(token)) {
        candidates_of(logits);
        llama_token_data_array array{candidates.data(), candidates.size(), -1, false};
        llama_sampler_apply(grammar_.get(), &array);
        std::erase_if(candidates, [](const llama_token_data& c) { return !(c.logit > -INFINITY); });
        if (!candidates.empty()) token = greedy_ ? best_candidate() : draw(false);
      }
      llama_sampler_accept(grammar_.get(), token);
    }
    ++drawn_[token];
    accept(token);
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
      return token >= 0 && token < std::ssize(logits) ? &logits[static_cast<size_t>(token)] : nullptr;
    };
    for (const auto& [token, bias] : options_.logit_bias)
      if (float* logit = at(token)) *logit += bias;
    for (const auto& [token, count] : seen_)
      if (float* logit = at(token))
        *logit = *logit <= 0 ? *logit * options_.repeat_penalty : *logit / options_.repeat_penalty;
    for (const auto& [token, count] : drawn_)
      if (float* logit = at(token))
        *logit -= options_.presence_penalty + options_.frequency_penalty * static_cast<float>(count);
  }

  int32_t choose(std::span<const float> logits) {
    if (greedy_)  // the first of equals
      return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    if (options_.top_k > 0 && options_.top_k <= kFewCandidates) {
      likeliest(logits, static_cast<size_t>(options_.top_k));
      return draw(true);
    }
    candidates_of(logits);
    return draw(false);
  }

  void candidates_of(std::span<const float> logits) {
    candidates.resize(logits.size());
    for (size_t i = 0; i < logits.size(); ++i) candidates[i] = {static_cast<llama_token>(i), logits[i], 0};
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
      candidates.push_back({static_cast<llama_token>(i), logits[i], 0});
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

  int32_t draw(bool sorted) {
    llama_token_data_array array{candidates.data(), candidates.size(), -1, sorted};
    llama_sampler_apply(chain_.get(), &array);
    return array.data[array.selected].id;
  }

  bool fits(int32_t token) {
    llama_token_data one{token, 1, 0};
    llama_token_data_array array{&one, 1, -1, false};
    llama_sampler_apply(grammar_.get(), &array);
    return one.logit > -INFINITY;
  }

  const SamplingOptions options_;
  const bool greedy_;
  struct Free {
    void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
  };
  std::unique_ptr<llama_sampler, Free> chain_;    // null when greedy
  std::unique_ptr<llama_sampler, Free> grammar_;  // null when any answer will do
  // Shared by all samplers of a thread: as long as the vocabulary, and meaningless between two draws.
  static thread_local std::vector<llama_token_data> candidates;
  static thread_local std::vector<float> changed;  // logits with bias and penalties
  std::deque<int32_t> recent_;                     // the last repeat_last_n tokens
  std::unordered_map<int32_t, int> seen_;          // how often each is in recent_; never 0
  std::unordered_map<int32_t, int> drawn_;         // how often the answer has each
};

thread_local std::vector<llama_token_data> LlamaSampler::candidates;
thread_local std::vector<float> LlamaSampler::changed;

// --- chat templates ----------------------------------------------------------------------------------------------
// The content of the system turn that a ChatML template writes out itself for conversations that bring none. It is
// recognized as a complete system turn inside one string literal of the template; a turn that is put together from
// messages or tools has quotes or braces in it. libllama's ChatML leaves the default turn out.
//   {{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, ...<|im_end|>\n' }}      (SmolLM2)
std::optional<std::string> default_system_turn(std::string_view chat_template) {
  for (const std::string_view newline : {"\n", "\\n"}) {
    const std::string begin = std::string("<|im_start|>system").append(newline);
    for (size_t at = chat_template.find(begin); at != std::string_view::npos;
         at = chat_template.find(begin, at + 1)) {
      const std::string_view rest = chat_template.substr(at + begin.size());
      const size_t end = rest.find("<|im_end|>");
      if (end == std::string_view::npos) break;
      std::string_view literal = rest.substr(0, end);
      if (literal.find_first_of("'\"{}") != std::string_view::npos) continue;
      std::string content;
      for (; !literal.empty(); literal.remove_prefix(1)) {
        const bool escaped_newline = literal.starts_with("\\n");
        content += escaped_newline ? '\n' : literal.front();
        if (escaped_newline) literal.remove_prefix(1);
      }
      return content;
    }
  }
  return std::nullopt;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

// A part of a prompt: words of the template, in which control tokens count, or a message, in which they do not.
struct PromptPart {
  std::string text;
  bool from_template = false;
  std::span<const int32_t> tokens = {};  // of a message that brings its own
};

// --- the vocabulary ----------------------------------------------------------------------------------------------
class LlamaText : public Text {
 public:
  using Model = std::unique_ptr<llama_model, void (*)(llama_model*)>;

  explicit LlamaText(Model model) : model_(std::move(model)), vocab_(llama_model_get_vocab(model_.get())) {
    if (const char* text = llama_model_chat_template(model_.get(), nullptr)) {
      chat_template_ = text;
      default_system_ = default_system_turn(*chat_template_);
    }
    if (!has_words()) return;
    for (int32_t token = 0; token < llama_vocab_n_tokens(vocab_); ++token) {
      if (!(llama_vocab_get_attr(vocab_, token) & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN))) continue;
      std::string text = llama_vocab_get_text(vocab_, token);
      if (text.empty()) continue;
      control_sizes_.push_back(text.size());
      control_.emplace(std::move(text), token);
    }
    std::sort(control_sizes_.begin(), control_sizes_.end(), std::greater<>());
    control_sizes_.erase(std::unique(control_sizes_.begin(), control_sizes_.end()), control_sizes_.end());
  }

  int64_t vocab_size() const override { return llama_vocab_n_tokens(vocab_); }

  Result<std::vector<int32_t>> tokenize(std::string_view text, bool add_special,
                                        bool parse_special) const override {
    if (!has_words()) return Status(Code::kUnsupported, "[tokenize] the model file has no vocabulary");
    if (const int64_t at = find_invalid_utf8(text); at >= 0) {
      return invalid_argument("[tokenize] the text is not valid UTF-8 at byte " + std::to_string(at) + " of " +
                              std::to_string(text.size()));
    }
    constexpr size_t kMaxBytes = size_t{1} << 30;  // libllama counts in int32
    if (text.size() > kMaxBytes) {
      return invalid_argument("[tokenize] the text has " + std::to_string(text.size()) + " bytes, the limit is " +
                              std::to_string(kMaxBytes));
    }
    try {
      std::vector<int32_t> tokens(text.size() / 2 + 16);
      while (true) {
        const int32_t n = llama_tokenize(vocab_, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                                         static_cast<int32_t>(tokens.size()), add_special, parse_special);
        if (n == INT32_MIN) return invalid_argument("[tokenize] the text gives more than 2147483647 tokens");
        tokens.resize(static_cast<size_t>(std::abs(n)));
        if (n >= 0) return tokens;
      }
    } catch (const std::bad_alloc&) {
      return Status(Code::kNoMemory,
                    "[tokenize] no memory to tokenize " + std::to_string(text.size()) + " bytes of text");
    } catch (const std::exception& error) {
      return Status(Code::kInternal, std::string("[tokenize] libllama: ") + error.what());
    }
  }

  std::string piece(int32_t token) const override {
    if (!has_words() || token < 0 || token >= vocab_size()) return "";
    std::string bytes(32, '\0');
    int32_t n = 0;
    while ((n = llama_token_to_piece(vocab_, token, bytes.data(), static_cast<int32_t>(bytes.size()), 0, false)) <
           0)
      bytes.resize(static_cast<size_t>(-n));
    bytes.resize(static_cast<size_t>(n));
    return bytes;
  }

  bool is_end(int32_t token) const override { return has_words() && llama_vocab_is_eog(vocab_, token); }

  int32_t bos() const override {
    return has_words() && llama_vocab_get_add_bos(vocab_) ? llama_vocab_bos(vocab_) : -1;
  }

  bool has_chat_template() const override { return chat_template_.has_value(); }

  std::optional<std::string> default_system() const override { return default_system_; }

  Result<std::string> apply_chat_template(std::span<const ChatMessage> messages) const override {
    auto parts = prompt_parts(messages);
    if (!parts.ok()) return parts.status();
    std::string prompt;
    for (const PromptPart& part : *parts) prompt += part.text;
    return prompt;
  }

  Result<std::vector<int32_t>> tokenize_chat(std::span<const ChatMessage> messages) const override {
    for (size_t i = 0; i < messages.size(); ++i) {
      const std::string& content = messages[i].content;
      if (const int64_t at = find_invalid_utf8(content); at >= 0) {
        return invalid_argument("[tokenize] message " + std::to_string(i) + " (" + messages[i].role +
                                ") is not valid UTF-8 at byte " + std::to_string(at) + " of " +
                                std::to_string(content.size()));
      }
    }
    const auto parts = prompt_parts(messages);
    if (!parts.ok()) return parts.status();

    std::vector<int32_t> prompt;
    if (bos() >= 0) prompt.push_back(bos());
    // Plain text between two control tokens is tokenized in one go, over the borders of messages: the tokens are
    // those the model was trained on, as if control tokens were looked for in the whole prompt.
    std::string plain;
    bool strip = false;  // the last control token takes the white space after it (a few vocabularies)
    const auto add_plain = [&](std::string_view text) {
      if (strip) text.remove_prefix(std::min(text.find_first_not_of(" \t\n\v\f\r"), text.size()));
      strip = strip && text.empty();
      plain += text;
    };
    const auto flush = [&]() -> Status {
      auto tokens = tokenize(plain, false, false);
      if (!tokens.ok()) return tokens.status();
      prompt.insert(prompt.end(), tokens->begin(), tokens->end());
      plain.clear();
      return Status();
    };
    for (const PromptPart& part : *parts) {
      std::string_view text = part.text;
      while (part.from_template && !text.empty()) {
        const auto [at, token, size] = next_control(text);
        add_plain(text.substr(0, at));
        text.remove_prefix(at + size);
        if (token < 0) break;
        const auto attributes = llama_vocab_get_attr(vocab_, token);
        if (attributes & LLAMA_TOKEN_ATTR_LSTRIP) plain.resize(plain.find_last_not_of(" \t\n\v\f\r") + 1);
        if (Status status = flush(); !status.ok()) return status;
        prompt.push_back(token);
        strip = attributes & LLAMA_TOKEN_ATTR_RSTRIP;
      }
      if (part.from_template) continue;
      if (part.tokens.empty()) {
        add_plain(text);
        continue;
      }
      if (Status status = flush(); !status.ok()) return status;
      prompt.insert(prompt.end(), part.tokens.begin(), part.tokens.end());
      strip = false;
    }
    if (Status status = flush(); !status.ok()) return status;
    return prompt;
  }

  Result<std::unique_ptr<Sampler>> make_sampler(const SamplingOptions& options) const override {
    if (Status status = check_sampling(options); !status.ok()) return status;
    for (const auto& [token, bias] : options.logit_bias) {
      if (token >= 0 && token < vocab_size()) continue;
      return invalid_argument("[sampling] logit_bias for token " + std::to_string(token) + ", the vocabulary has " +
                              std::to_string(vocab_size()));
    }
    if (!options.grammar.empty() && !has_words())
      return Status(Code::kUnsupported, "[sampling] a grammar needs a vocabulary, and the model file has none");
    auto sampler = std::make_unique<LlamaSampler>(vocab_, options);
    if (!options.grammar.empty() && !sampler->has_grammar())
      return invalid_argument("[sampling] the grammar cannot be read");
    return std::unique_ptr<Sampler>(std::move(sampler));
  }

  // False for files made without a vocabulary: they have token ids, but no text.
  bool has_words() const { return llama_vocab_type(vocab_) != LLAMA_VOCAB_TYPE_NONE; }

  // libllama asserts where a vocabulary wants a token that it does not have.
  Status check() const {
    if (!has_words()) return Status();
    if (llama_vocab_get_add_bos(vocab_) && llama_vocab_bos(vocab_) == LLAMA_TOKEN_NULL)
      return Status(Code::kCorrupt, "[vocabulary] tokenizer.ggml.add_bos_token is set, and there is no BOS token");
    if (llama_vocab_get_add_eos(vocab_) && llama_vocab_eos(vocab_) == LLAMA_TOKEN_NULL)
      return Status(Code::kCorrupt, "[vocabulary] tokenizer.ggml.add_eos_token is set, and there is no EOS token");
    return Status();
  }

 private:
  // The first control token in `text`; the longest where several begin. {text.size(), -1, 0} without one.
  struct Control {
    size_t at;
    int32_t token;
    size_t size;
  };
  Control next_control(std::string_view text) const {
    for (size_t at = 0; at < text.size(); ++at) {
      for (const size_t size : control_sizes_) {
        if (size > text.size() - at) continue;
        const auto found = control_.find(std::string(text.substr(at, size)));
        if (found != control_.end()) return {at, found->second, size};
      }
    }
    return {text.size(), -1, 0};
  }

  // Renders the template with a placeholder for each message, then cuts it at the placeholders: what a message says
  // never passes through the template, so it can neither end its turn nor begin another. The vertical tabs around
  // a placeholder tell whether the template trims messages.
  Result<std::vector<PromptPart>> prompt_parts(std::span<const ChatMessage> messages) const {
    if (!chat_template_)
      return Status(Code::kUnsupported, "[chat template] the model has none; give it plain text");
    if (messages.empty()) return invalid_argument("[chat template] no messages");
    for (const ChatMessage& message : messages) {
      if (message.role != "system" && message.role != "user" && message.role != "assistant")
        return invalid_argument("[chat template] role is \"" + message.role +
                                "\"; allowed are system, user, assistant");
    }

    const auto mark = [](size_t i) { return std::string("\x01").append(std::to_string(i)).append("\x01"); };
    std::vector<std::string> placeholders;
    for (size_t i = 0; i < messages.size(); ++i)
      placeholders.push_back(std::string("\v").append(mark(i)).append("\v"));
    std::vector<llama_chat_message> chat;
    for (size_t i = 0; i < messages.size(); ++i)
      chat.push_back({messages[i].role.c_str(), placeholders[i].c_str()});
    std::string rendered(1024, '\0');
    while (true) {
      const int32_t n = llama_chat_apply_template(chat_template_->c_str(), chat.data(), chat.size(), true,
                                                  rendered.data(), static_cast<int32_t>(rendered.size()));
      if (n < 0) {
        return Status(Code::kUnsupported,
                      "[chat template] the model's template is not one that libllama knows (ChatML, Llama 2 to 4, "
                      "Mistral, Gemma, Phi, DeepSeek, Granite, Command R and about 40 more)");
      }
      const bool whole = static_cast<size_t>(n) <= rendered.size();
      rendered.resize(static_cast<size_t>(n));
      if (whole) break;
    }

    struct Place {
      size_t begin, end, message;
      bool trim;
    };
    std::vector<Place> places;
    for (size_t i = 0; i < messages.size(); ++i) {
      size_t at = rendered.find(placeholders[i]);
      const bool trim = at == std::string::npos;
      if (trim) at = rendered.find(mark(i));
      if (at == std::string::npos)
        return Status(Code::kUnsupported, "[chat template] the model's template has no place for message " +
                                              std::to_string(i) + " (" + messages[i].role + ")");
      places.push_back({at, at + (trim ? mark(i) : placeholders[i]).size(), i, trim});
    }
    std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.begin < b.begin; });
    std::vector<PromptPart> parts;
    size_t at = 0;
    for (const Place& place : places) {
      parts.push_back({rendered.substr(at, place.begin - at), true});
      const ChatMessage& message = messages[place.message];
      const std::string& content = message.content;
      parts.push_back({std::string(place.trim ? trimmed(content) : content), false, message.tokens});
      at = place.end;
    }
    parts.push_back({rendered.substr(at), true});
    return parts;
  }

  Model model_;
  const llama_vocab* vocab_;  // lives in model_
  std::optional<std::string> chat_template_;
  std::optional<std::string> default_system_;
  std::unordered_map<std::string, int32_t> control_;  // text of every control token
  std::vector<size_t> control_sizes_;                 // the lengths that occur, longest first
};

}  // namespace

Status check_sampling(const SamplingOptions& options) {
  for (Status status :
       {check_range("temperature", options.temperature, 0.0f, 100.0f),
        check_range("top_k", options.top_k, 0, INT32_MAX), check_range("top_p", options.top_p, 0.0f, 1.0f),
        check_range("min_p", options.min_p, 0.0f, 1.0f),
        check_range("repeat_penalty", options.repeat_penalty, 0.1f, 10.0f),
        check_range("repeat_last_n", options.repeat_last_n, 0, 65536),
        check_range("presence_penalty", options.presence_penalty, -2.0f, 2.0f),
        check_range("frequency_penalty", options.frequency_penalty, -2.0f, 2.0f)}) {
    if (!status.ok()) return status;
  }
  for (const auto& [token, bias] : options.logit_bias) {
    if (Status status = check_range("logit_bias", bias, -100.0f, 100.0f); !status.ok()) return status;
  }
  return Status();
}

Result<std::unique_ptr<Text>> Text::load(const std::string& path) {
  start_libllama();
  auto params = llama_model_default_params();
  params.vocab_only = true;
  std::string error;
  load_error = &error;
  LlamaText::Model model(llama_model_load_from_file(path.c_str(), params), llama_model_free);
  load_error = nullptr;
  if (model == nullptr) {
    return Status(Code::kCorrupt, "[vocabulary] libllama cannot read the vocabulary of " + path +
                                      (error.empty() ? "" : ": " + error));
  }
  auto text = std::make_unique<LlamaText>(std::move(model));
  if (Status status = text->check(); !status.ok()) return status;
  return std::unique_ptr<Text>(std::move(text));
}

}  // namespace pagedkv::engine
