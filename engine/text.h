// Vocabulary, chat templates and samplers. The one face behind which libllama does text.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pagedkv/status.h"

namespace pagedkv::engine {

struct ChatMessage {
  std::string role;  // system, user, assistant
  std::string content;
  // The tokens of `content` where they are known, as of an answer that was generated: they are used as they are, so
  // that a later prompt begins with just what is cached. Empty: tokenized.
  std::vector<int32_t> tokens = {};
};

// Applied in this order: bias, penalties, grammar, top-k, top-p, min-p, temperature, then one draw.
struct SamplingOptions {
  float temperature = 0.8f;     // 0 .. 100; larger: more varied. Below 1e-6: greedy, the penalty still applies
  int top_k = 40;               // 0 .. 2^31-1 most likely tokens stay; 0: all
  float top_p = 0.95f;          // 0 .. 1, the share of probability that stays; 1: all
  float min_p = 0.05f;          // 0 .. 1, least probability relative to the best token; 0: off
  float repeat_penalty = 1;     // 0.1 .. 10; above 1: recent tokens become less likely; 1: off
  int repeat_last_n = 64;       // 0 .. 65536 tokens the penalty looks back, prompt included; 0: off
  uint64_t seed = 0;            // the same seed draws the same tokens
  float presence_penalty = 0;   // -2 .. 2, taken from the logit of each token that the answer has; 0: off
  float frequency_penalty = 0;  // -2 .. 2, the same times how often it has it; 0: off
  std::vector<std::pair<int32_t, float>> logit_bias = {};  // token, and -100 .. 100 added to its logit
  std::string grammar =
      {};  // GBNF with the rule "root" (grammar.h): only answers that it derives are drawn. Empty: any
};

// kInvalidArgument naming the option, its value and its range (NaN is never in range).
Status check_sampling(const SamplingOptions& options);

// The sampling state of one stream. One thread.
class Sampler {
 public:
  virtual ~Sampler() = default;
  // logits  [vocabulary size]. Chooses a token and takes it into account for the next call. After an error the
  // answer cannot go on. Errors: kInvalidArgument (no token fits the grammar), kNotFinite (NaN, or nothing to draw
  // from).
  virtual Result<int32_t> sample(std::span<const float> logits) = 0;
  // Takes a token of the prompt into account, for the repeat penalty.
  virtual void accept(int32_t token) = 0;
};

// Const members: any thread.
class Text {
 public:
  // Reads the vocabulary of a GGUF file whose header has been validated (gguf_file.h).
  static Result<std::unique_ptr<Text>> load(const std::string& path);
  virtual ~Text() = default;

  virtual int64_t vocab_size() const = 0;
  // Errors: kInvalidArgument when `text` is not valid UTF-8, with the byte offset, or has a character that the
  // vocabulary cannot spell, with the character.
  virtual Result<std::vector<int32_t>> tokenize(std::string_view text, bool add_special,
                                                bool parse_special) const = 0;
  // The bytes of one token: possibly a part of a UTF-8 character. Control tokens give "".
  virtual std::string piece(int32_t token) const = 0;
  // Bytes of a text that one token stands for at most. A text of n bytes has n / longest_piece() tokens at least.
  virtual int64_t longest_piece() const = 0;
  // The text of tokens in a row: the reverse of tokenize, without the space that some vocabularies put in front of
  // a text. Bytes that are no characters are kept.
  std::string spell(std::span<const int32_t> tokens) const;
  virtual bool is_end(int32_t token) const = 0;  // ends the answer
  virtual bool is_control(int32_t token) const { return is_end(token); }
  // The tokenizer puts a space in front of each text (SentencePiece).
  virtual bool has_space_prefix() const { return false; }
  virtual int32_t bos() const = 0;  // -1: the vocabulary has none or does not want it
  virtual bool has_chat_template() const = 0;
  // The system message that the model's own template writes for a conversation without one; libllama's rendering
  // leaves it out. Nothing adds it unasked: a caller that wants it puts it in front. Empty optional: there is none.
  virtual std::optional<std::string> default_system() const = 0;
  // The prompt text for a conversation, ready for the assistant's turn; to be read, not to be tokenized (see
  // tokenize_chat). Errors: kUnsupported for a template that libllama does not know, kInvalidArgument for a role
  // other than system, user, assistant.
  virtual Result<std::string> apply_chat_template(std::span<const ChatMessage> messages) const = 0;
  // The tokens of that prompt. Control tokens come from the template alone: the same words inside a message are
  // plain text. Errors: those of apply_chat_template and tokenize (with the message's index).
  virtual Result<std::vector<int32_t>> tokenize_chat(std::span<const ChatMessage> messages) const = 0;
  // Errors: those of check_sampling, a bias for a token that is none, a grammar that cannot be read
  // (kInvalidArgument, with the line), kNoMemory.
  virtual Result<std::unique_ptr<Sampler>> make_sampler(const SamplingOptions& options) const = 0;
};

// Byte offset of the first byte that is not valid UTF-8, or -1.
int64_t find_invalid_utf8(std::string_view text);

// Turns a stream of token pieces into text that may be shown: holds back incomplete UTF-8 and anything that may
// yet become a stop string. What was held back is not lost when the stream ends without the stop string. The text
// does not depend on how the stream was cut into pieces. One thread.
class TextStream {
 public:
  // The first stop string to be complete ends the text, and is not part of it. Empty ones are ignored.
  explicit TextStream(std::vector<std::string> stop_strings = {});
  // What can be shown after this piece: whole characters, bytes that are none as U+FFFD. Empty once stopped().
  std::string push(std::string_view piece);
  // The rest at the end of generation; an incomplete character becomes U+FFFD.
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stop_strings_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace pagedkv::engine
