#include "server/completion_reply.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>
#include <utility>

#include "server/json_body.h"

namespace pagedkv::server {
namespace {

using engine::ScoredToken;
using engine::TokenScore;

// JSON has no infinity.
OrderedJson finite(float logprob) { return std::isfinite(logprob) ? OrderedJson(logprob) : OrderedJson(-9999.0); }

OrderedJson chat_score(const TokenScore& score, const engine::Text& text) {
  const std::string piece = text.piece(score.token);
  OrderedJson bytes = OrderedJson::array();
  for (const unsigned char c : piece) bytes.push_back(int{c});
  return {{"token", piece}, {"logprob", finite(score.logprob)}, {"bytes", std::move(bytes)}};
}

OrderedJson chat_logprobs(const std::vector<ScoredToken>& tokens, const engine::Text& text) {
  OrderedJson content = OrderedJson::array();
  for (const ScoredToken& token : tokens) {
    OrderedJson one = chat_score(token.drawn, text);
    one["top_logprobs"] = OrderedJson::array();
    for (const TokenScore& score : token.top) one["top_logprobs"].push_back(chat_score(score, text));
    content.push_back(std::move(one));
  }
  return {{"content", std::move(content)}, {"refusal", nullptr}};
}

bool is_character_begin(char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }

int64_t n_characters(std::string_view text) { return std::count_if(text.begin(), text.end(), is_character_begin); }

// A token's name in the older form. Pieces that are no whole characters would all become the same one in JSON.
std::string name_of(const std::string& piece) {
  if (engine::find_invalid_utf8(piece) < 0) return piece;
  std::string name = "bytes:";
  for (const unsigned char c : piece) {
    char byte[8];
    std::snprintf(byte, sizeof byte, "\\x%02x", c);
    name += byte;
  }
  return name;
}

// The older form: parallel lists. offset: of the first token, in characters.
OrderedJson legacy_logprobs(const std::vector<ScoredToken>& tokens, int64_t offset, const engine::Text& text) {
  OrderedJson out = {{"tokens", OrderedJson::array()},
                     {"token_logprobs", OrderedJson::array()},
                     {"top_logprobs", OrderedJson::array()},
                     {"text_offset", OrderedJson::array()}};
  for (const ScoredToken& token : tokens) {
    const std::string piece = text.piece(token.drawn.token);
    out["tokens"].push_back(name_of(piece));
    out["token_logprobs"].push_back(finite(token.drawn.logprob));
    OrderedJson top = OrderedJson::object();
    for (const TokenScore& score : token.top)
      if (const std::string name = name_of(text.piece(score.token)); !top.contains(name))
        top[name] = finite(score.logprob);
    out["top_logprobs"].push_back(std::move(top));
    out["text_offset"].push_back(offset);
    offset += n_characters(piece);
  }
  return out;
}

OrderedJson usage_json(const engine::Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
}

}  // namespace

CompletionReply::CompletionReply(Endpoint endpoint, std::string id, std::string model, int64_t created,
                                 int64_t n_choices, bool logprobs, bool usage_in_stream, const engine::Text& text)
    : endpoint_(endpoint),
      id_(std::move(id)),
      model_(std::move(model)),
      created_(created),
      logprobs_(logprobs),
      usage_in_stream_(usage_in_stream),
      text_(text),
      choices_(size_t(n_choices)) {}

// The tokens whose text is shown by now. Those of a stop string never are, and are not listed.
std::vector<ScoredToken> CompletionReply::listed(Choice& choice, const engine::Delta& delta) const {
  choice.held.insert(choice.held.end(), delta.tokens.begin(), delta.tokens.end());
  const bool first_words = choice.n_shown == 0 && !delta.text.empty() && delta.text[0] != ' ';
  choice.n_shown += std::ssize(delta.text);
  if (choice.held.empty()) return {};
  // A space that an answer's first token begins with may be the vocabulary's, not the text's.
  if (first_words && choice.n_listed == 0 && text_.piece(choice.held[0].drawn.token).starts_with(' '))
    choice.n_listed = -1;
  const bool all = delta.finish == engine::FinishReason::kLength;
  size_t n = 0;
  for (; n < choice.held.size() && (all || choice.n_listed < choice.n_shown); ++n)
    choice.n_listed += std::ssize(text_.piece(choice.held[n].drawn.token));
  const auto end = choice.held.begin() + std::ptrdiff_t(n);
  std::vector<ScoredToken> tokens(choice.held.begin(), end);
  choice.held.erase(choice.held.begin(), end);
  return tokens;
}

void CompletionReply::add(const engine::Delta& delta) {
  Choice& choice = choices_[size_t(delta.choice)];
  choice.text += delta.text;
  const std::vector<ScoredToken> tokens = listed(choice, delta);
  choice.tokens.insert(choice.tokens.end(), tokens.begin(), tokens.end());
  if (delta.finish) choice.finish = engine::finish_reason_name(*delta.finish);
}

std::string CompletionReply::event(std::string choices, bool usage_null) const {
  std::string out = "data: {\"id\":\"" + id_ + "\",\"object\":\"";
  out += endpoint_ == Endpoint::kChat ? "chat.completion.chunk" : "text_completion";
  out += "\",\"created\":" + std::to_string(created_) + ",\"model\":" + dump(model_) +
         ",\"choices\":" + std::move(choices);
  if (usage_null) out += ",\"usage\":null";
  return out + "}\n\n";
}

std::string CompletionReply::events(const engine::Delta& delta) {
  Choice& choice = choices_[size_t(delta.choice)];
  const std::string index = std::to_string(delta.choice);
  std::string out;
  if (endpoint_ == Endpoint::kChat && !choice.begun) {
    out +=
        event("[{\"index\":" + index +
                  ",\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]",
              usage_in_stream_);
  }
  choice.begun = true;
  std::string logprobs = "null";
  if (const std::vector<ScoredToken> tokens = listed(choice, delta); !tokens.empty()) {
    logprobs = dump(endpoint_ == Endpoint::kChat ? chat_logprobs(tokens, text_)
                                                 : legacy_logprobs(tokens, choice.text_offset, text_));
    for (const ScoredToken& token : tokens) choice.text_offset += n_characters(text_.piece(token.drawn.token));
  }
  if (!delta.text.empty() || logprobs != "null") {
    const std::string text = dump(delta.text);
    out += event(endpoint_ == Endpoint::kChat ? "[{\"index\":" + index + ",\"delta\":{\"content\":" + text +
                                                    "},\"logprobs\":" + logprobs + ",\"finish_reason\":null}]"
                                              : "[{\"index\":" + index + ",\"text\":" + text +
                                                    ",\"logprobs\":" + logprobs + ",\"finish_reason\":null}]",
                 usage_in_stream_);
  }
  if (delta.finish) {
    const std::string finish = std::string("\"") + engine::finish_reason_name(*delta.finish) + "\"";
    out +=
        event(endpoint_ == Endpoint::kChat
                  ? "[{\"index\":" + index + ",\"delta\":{},\"logprobs\":null,\"finish_reason\":" + finish + "}]"
                  : "[{\"index\":" + index + ",\"text\":\"\",\"logprobs\":null,\"finish_reason\":" + finish + "}]",
              usage_in_stream_);
  }
  return out;
}

std::string CompletionReply::last_events(const engine::Usage& usage) const {
  std::string out;
  if (usage_in_stream_) {
    out = event("[]", false);
    out.resize(out.size() - 3);  // "}\n\n"
    out += ",\"usage\":" + dump(usage_json(usage)) + "}\n\n";
  }
  return out + "data: [DONE]\n\n";
}

std::string CompletionReply::error_event(const ApiError& error) { return "data: " + error_json(error) + "\n\n"; }

std::string CompletionReply::whole(const engine::Usage& usage) const {
  OrderedJson list = OrderedJson::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const Choice& choice = choices_[i];
    OrderedJson one = {{"index", i}};
    if (endpoint_ == Endpoint::kChat) {
      one["message"] = {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
      one["logprobs"] = logprobs_ ? chat_logprobs(choice.tokens, text_) : OrderedJson();
    } else {
      one["text"] = choice.text;
      one["logprobs"] = logprobs_ ? legacy_logprobs(choice.tokens, 0, text_) : OrderedJson();
    }
    one["finish_reason"] = choice.finish;
    list.push_back(std::move(one));
  }
  return dump({{"id", id_},
               {"object", endpoint_ == Endpoint::kChat ? "chat.completion" : "text_completion"},
               {"created", created_},
               {"model", model_},
               {"choices", std::move(list)},
               {"usage", usage_json(usage)}});
}

}  // namespace pagedkv::server
