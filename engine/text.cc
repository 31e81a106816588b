// With sampler.cc, the engine's only file that knows libllama.
#include "engine/text.h"

#include <llama.h>

#include <array>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>
#include <locale>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <sstream>
#include <unordered_map>
#include <utility>

#include "engine/sampler.h"
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
  message.imbue(std::locale::classic());
  message << "[sampling] " << option << " is " << value << ", allowed are " << low << " to " << high;
  return invalid_argument(std::move(message).str());
}

// --- characters --------------------------------------------------------------------------------------------------
// The character that begins at `at` in valid UTF-8.
std::string_view character_at(std::string_view text, size_t at) {
  size_t end = at + 1;
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) ++end;
  return text.substr(at, end - at);
}

// "U+0004", or "U+00E9 (é)" where it can be shown.
std::string name_of(std::string_view character) {
  uint32_t code = static_cast<unsigned char>(character[0]);
  if (character.size() > 1) code &= 0x3fu >> (character.size() - 1);
  for (const char c : character.substr(1)) code = code << 6 | (static_cast<unsigned char>(c) & 0x3fu);
  char name[16];
  std::snprintf(name, sizeof name, "U+%04X", code);
  return code < 0x20 || (code >= 0x7f && code < 0xa0) ? name : name + (" (" + std::string(character) + ")");
}

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
class LlamaText final : public Text, public Vocabulary {
 public:
  using Model = std::unique_ptr<llama_model, void (*)(llama_model*)>;

  explicit LlamaText(Model model) : model_(std::move(model)), vocab_(llama_model_get_vocab(model_.get())) {
    if (const char* text = llama_model_chat_template(model_.get(), nullptr)) {
      chat_template_ = text;
      default_system_ = default_system_turn(*chat_template_);
    }
    if (!has_words()) return;
    has_space_prefix_ = reads_space_prefix();
    find_missing_bytes();
    for (int32_t token = 0; token < llama_vocab_n_tokens(vocab_); ++token) {
      if (llama_vocab_is_eog(vocab_, token)) end_tokens_.push_back(token);
      longest_piece_ = std::max({longest_piece_, std::ssize(piece(token)),
                                 std::ssize(std::string_view(llama_vocab_get_text(vocab_, token)))});
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
        const int32_t n = llama_tokenize(vocab_, text.data(), int32_t(text.size()), tokens.data(),
                                         int32_t(tokens.size()), add_special, parse_special);
        if (n == INT32_MIN) return invalid_argument("[tokenize] the text gives more than 2147483647 tokens");
        tokens.resize(size_t(std::abs(n)));
        if (n < 0) continue;
        if (Status status = check_spelled(text, tokens); !status.ok()) return status;
        return tokens;
      }
    } catch (const std::bad_alloc&) {
      return Status(Code::kNoMemory,
                    "[tokenize] no memory to tokenize " + std::to_string(text.size()) + " bytes of text");
    } catch (const std::exception& error) {
      return cannot_spell(text, error.what());
    }
  }

  std::string piece(int32_t token) const override {
    if (!has_words() || token < 0 || token >= vocab_size()) return "";
    std::string bytes(32, '\0');
    int32_t n = 0;
    while ((n = llama_token_to_piece(vocab_, token, bytes.data(), int32_t(bytes.size()), 0, false)) < 0)
      bytes.resize(size_t(-n));
    bytes.resize(size_t(n));
    return bytes;
  }

  bool is_end(int32_t token) const override {
    return has_words() && token >= 0 && token < vocab_size() && llama_vocab_is_eog(vocab_, token);
  }
  bool is_control(int32_t token) const override {
    return has_words() && token >= 0 && token < vocab_size() && llama_vocab_is_control(vocab_, token);
  }
  bool has_space_prefix() const override { return has_space_prefix_; }

  const std::vector<int32_t>& end_tokens() const override { return end_tokens_; }

  int64_t longest_piece() const override { return longest_piece_; }

  const SortedPieces& sorted_pieces() const override {
    std::call_once(pieces_once_, [this] {
      std::vector<std::string> pieces(size_t(this->vocab_size()));
      for (size_t token = 0; token < pieces.size(); ++token) pieces[token] = piece(int32_t(token));
      pieces_.emplace(pieces);
    });
    return *pieces_;
  }

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
    try {
      return make_vocabulary_sampler(*this, options);
    } catch (const std::bad_alloc&) {
      return Status(Code::kNoMemory, "[sampling] no memory for the sampler");
    }
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
  bool reads_space_prefix() const {
    if (llama_vocab_type(vocab_) != LLAMA_VOCAB_TYPE_SPM) return false;
    char value[8];
    return llama_model_meta_val_str(model_.get(), "tokenizer.ggml.add_space_prefix", value, sizeof value) < 0 ||
           std::string_view(value) == "true";
  }
  // Byte-level vocabularies have a token for each byte that their text had, which may be fewer than 256.
  void find_missing_bytes() {
    if (llama_vocab_type(vocab_) != LLAMA_VOCAB_TYPE_BPE) return;
    missing_.fill(true);
    for (int32_t token = 0; token < llama_vocab_n_tokens(vocab_); ++token) {
      if (is_control(token)) continue;
      if (const std::string bytes = piece(token); bytes.size() == 1)
        missing_[static_cast<unsigned char>(bytes[0])] = false;
    }
  }
  // libllama leaves a byte out that its vocabulary lacks, and says nothing. It may be part of a longer token,
  // though.
  Status check_spelled(std::string_view text, std::span<const int32_t> tokens) const {
    const auto is_missing = [this](char c) { return missing_[static_cast<unsigned char>(c)]; };
    auto count = std::count_if(text.begin(), text.end(), is_missing);
    if (count == 0) return Status();
    for (const int32_t token : tokens) {
      const std::string spelled = is_control(token) ? llama_vocab_get_text(vocab_, token) : piece(token);
      count -= std::count_if(spelled.begin(), spelled.end(), is_missing);
    }
    if (count <= 0) return Status();
    for (size_t at = 0; at < text.size();) {
      const std::string_view character = character_at(text, at);
      if (std::any_of(character.begin(), character.end(), is_missing)) return unspellable(character, at);
      at += character.size();
    }
    return Status();
  }
  // Tokenizing threw: the first character that does so by itself is named.
  Status cannot_spell(std::string_view text, const char* why) const {
    std::set<std::string_view> tried;
    for (size_t at = 0; at < text.size();) {
      const std::string_view character = character_at(text, at);
      if (tried.insert(character).second) {
        std::array<int32_t, 64> tokens;
        try {
          llama_tokenize(vocab_, character.data(), int32_t(character.size()), tokens.data(), int32_t(tokens.size()),
                         false, false);
        } catch (const std::exception&) {
          return unspellable(character, at);
        }
      }
      at += character.size();
    }
    return invalid_argument(std::string("[tokenize] the vocabulary cannot spell the text: ") + why);
  }
  static Status unspellable(std::string_view character, size_t at) {
    return invalid_argument("[tokenize] the character " + name_of(character) + " at byte " + std::to_string(at) +
                            " is not in the model's vocabulary, and cannot be spelled by its bytes");
  }

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

  // Where a message goes in a rendered template.
  struct Place {
    size_t begin, end, message;
    bool trim;
  };
  // In one pass, for a conversation of any length: placeholders are the only numbers between two \x01.
  static std::vector<Place> find_places(std::string_view rendered) {
    std::vector<Place> places;
    for (size_t at = 0; (at = rendered.find('\x01', at)) != std::string_view::npos;) {
      const size_t end = rendered.find('\x01', at + 1);
      if (end == std::string_view::npos) break;
      size_t message = 0;
      const auto [stop, error] = std::from_chars(&rendered[at] + 1, &rendered[end], message);
      if (error != std::errc() || stop != &rendered[end]) {
        at = end;
        continue;
      }
      const bool whole =
          at > 0 && rendered[at - 1] == '\v' && end + 1 < rendered.size() && rendered[end + 1] == '\v';
      places.push_back({at - whole, end + 1 + whole, message, !whole});
      at = end + 1;
    }
    return places;
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

    std::vector<std::string> placeholders;
    for (size_t i = 0; i < messages.size(); ++i) placeholders.push_back("\v\x01" + std::to_string(i) + "\x01\v");
    std::vector<llama_chat_message> chat;
    for (size_t i = 0; i < messages.size(); ++i)
      chat.push_back({messages[i].role.c_str(), placeholders[i].c_str()});
    std::string rendered(1024, '\0');
    while (true) {
      const int32_t n = llama_chat_apply_template(chat_template_->c_str(), chat.data(), chat.size(), true,
                                                  rendered.data(), int32_t(rendered.size()));
      if (n < 0) {
        return Status(Code::kUnsupported,
                      "[chat template] the model's template is not one that libllama knows (ChatML, Llama 2 to 4, "
                      "Mistral, Gemma, Phi, DeepSeek, Granite, Command R and about 40 more)");
      }
      const bool whole = size_t(n) <= rendered.size();
      rendered.resize(size_t(n));
      if (whole) break;
    }

    const std::vector<Place> places = find_places(rendered);
    std::vector<bool> has_place(messages.size());
    for (const Place& place : places) has_place[place.message] = true;
    if (const auto lost = std::find(has_place.begin(), has_place.end(), false); lost != has_place.end()) {
      const auto i = static_cast<size_t>(lost - has_place.begin());
      return Status(Code::kUnsupported, "[chat template] the model's template has no place for message " +
                                            std::to_string(i) + " (" + messages[i].role + ")");
    }
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
  bool has_space_prefix_ = false;
  int64_t longest_piece_ = 1;
  std::array<bool, 256> missing_{};  // bytes that no token stands for
  std::vector<int32_t> end_tokens_;
  mutable std::once_flag pieces_once_;
  mutable std::optional<SortedPieces> pieces_;
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

std::string Text::spell(std::span<const int32_t> tokens) const {
  std::string text;
  bool begins = has_space_prefix();  // the tokenizer has put a space here
  for (const int32_t token : tokens) {
    const std::string piece = this->piece(token);
    const bool drop = begins && piece.starts_with(' ');
    text += piece.substr(drop ? 1 : 0);
    begins = has_space_prefix() && (is_control(token) || (begins && piece.empty()));
  }
  return text;
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
