#include "server/completion_request.h"

#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <utility>

#include "server/json_body.h"
#include "server/json_grammar.h"

namespace pagedkv::server {
namespace {

constexpr int64_t kMaxPrompts = 64;
constexpr size_t kMaxStops = 16;
constexpr size_t kMaxStopBytes = 1024;
constexpr size_t kMaxBiases = 1024;
constexpr size_t kMaxSaltBytes = 256;

struct Refused {
  ApiError error;
};
[[noreturn]] void refuse(const std::string& param, const std::string& message) {
  throw Refused{{.message = message, .param = param}};
}

// A value as it is shown in an error: short, whatever it is.
std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

// Reads fields of one object and remembers which it was asked for. null counts as not given.
class Fields {
 public:
  Fields(const Json& object, std::string prefix = "") : object_(object), prefix_(std::move(prefix)) {}

  const Json* find(const std::string& name) {
    seen_.insert(name);
    const auto at = object_.find(name);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }
  std::string path(const std::string& name) const { return prefix_.empty() ? name : prefix_ + "." + name; }
  [[noreturn]] void wrong(const std::string& name, const Json& value, const std::string& expected) const {
    refuse(path(name), path(name) + " is " + shown(value) + ", expected is " + expected);
  }

  bool boolean(const std::string& name, bool otherwise) {
    const Json* value = find(name);
    if (!value) return otherwise;
    if (!value->is_boolean()) wrong(name, *value, "true or false");
    return value->get<bool>();
  }
  std::string string(const std::string& name, const std::string& otherwise, size_t most) {
    const Json* value = find(name);
    if (!value) return otherwise;
    if (!value->is_string()) wrong(name, *value, "a string");
    auto text = value->get<std::string>();
    if (text.size() > most) wrong(name, *value, "a string of at most " + std::to_string(most) + " bytes");
    return text;
  }
  // Whole numbers of any size; those past int64 are as large as it gets.
  std::optional<int64_t> whole(const std::string& name, int64_t low, int64_t high) {
    const Json* value = find(name);
    if (!value) return std::nullopt;
    const std::string range =
        "a whole number" + (high == std::numeric_limits<int64_t>::max()
                                ? " of at least " + std::to_string(low)
                                : " from " + std::to_string(low) + " to " + std::to_string(high));
    int64_t n = 0;
    if (value->is_number_unsigned()) {
      n = static_cast<int64_t>(std::min<uint64_t>(value->get<uint64_t>(), std::numeric_limits<int64_t>::max()));
    } else if (value->is_number_integer()) {
      n = value->get<int64_t>();
    } else if (value->is_number_float() && std::floor(value->get<double>()) == value->get<double>()) {
      n = value->get<double>() >= 9.2e18    ? std::numeric_limits<int64_t>::max()
          : value->get<double>() <= -9.2e18 ? std::numeric_limits<int64_t>::min()
                                            : static_cast<int64_t>(value->get<double>());
    } else {
      wrong(name, *value, range);
    }
    if (n < low || n > high) wrong(name, *value, range);
    return n;
  }
  void number(const std::string& name, double low, double high, float& target) {
    const Json* value = find(name);
    if (!value) return;
    const bool ok = value->is_number() && value->get<double>() >= low && value->get<double>() <= high;
    if (!ok) wrong(name, *value, "a number from " + Json(low).dump() + " to " + Json(high).dump());
    target = value->get<float>();
  }
  // Refuses a field whose being obeyed the client counts on.
  void unsupported(const std::string& name, const std::string& why,
                   const std::function<bool(const Json&)>& harmless) {
    const Json* value = find(name);
    if (value && !harmless(*value)) refuse(path(name), path(name) + ": " + why);
  }
  std::vector<std::string> rest() const {
    std::vector<std::string> names;
    for (const auto& [name, value] : object_.items())
      if (!seen_.contains(name)) names.push_back(path(name));
    return names;
  }

 private:
  const Json& object_;
  const std::string prefix_;
  std::set<std::string> seen_;
};

void read_stop(Fields& fields, std::vector<std::string>& stop) {
  const Json* value = fields.find("stop");
  if (!value) return;
  const std::string expected = "a string, or a list of at most " + std::to_string(kMaxStops) +
                               " strings, none empty or longer than " + std::to_string(kMaxStopBytes) + " bytes";
  if (value->is_string()) {
    stop.push_back(value->get<std::string>());
  } else if (value->is_array() && value->size() <= kMaxStops) {
    for (const Json& one : *value) {
      if (!one.is_string()) fields.wrong("stop", *value, expected);
      stop.push_back(one.get<std::string>());
    }
  } else {
    fields.wrong("stop", *value, expected);
  }
  for (const std::string& one : stop)
    if (one.empty() || one.size() > kMaxStopBytes) fields.wrong("stop", *value, expected);
}

// Signed or not, all 64 bits count. Without one: any.
uint64_t read_seed(Fields& fields) {
  const Json* value = fields.find("seed");
  if (!value) {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }
  if (value->is_number_unsigned()) return value->get<uint64_t>();
  if (value->is_number_integer()) return static_cast<uint64_t>(value->get<int64_t>());
  constexpr double kExact = 9007199254740992;  // 2^53: past it a double is no certain whole number
  const double number = value->is_number_float() ? value->get<double>() : kExact * 2;
  if (std::floor(number) != number || std::abs(number) > kExact)
    fields.wrong("seed", *value, "a whole number from -2^63 to 2^64 - 1");
  return static_cast<uint64_t>(static_cast<int64_t>(number));
}

void read_bias(Fields& fields, std::vector<std::pair<int32_t, float>>& bias, int64_t vocab_size) {
  const Json* value = fields.find("logit_bias");
  if (!value) return;
  const std::string expected =
      "an object of at most " + std::to_string(kMaxBiases) + " token ids, each with a number from -100 to 100";
  if (!value->is_object() || value->size() > kMaxBiases) fields.wrong("logit_bias", *value, expected);
  for (const auto& [name, amount] : value->items()) {
    int32_t token = -1;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), token);
    // Just as the id is written: neither " 5" nor "05", which would be a second word for 5.
    const bool whole = error == std::errc() && end == name.data() + name.size();
    if (!whole || token < 0 || token >= vocab_size || std::to_string(token) != name) {
      refuse("logit_bias", "logit_bias has \"" + name.substr(0, 40) + "\", expected are token ids from 0 to " +
                               std::to_string(vocab_size - 1));
    }
    if (!amount.is_number() || !(std::abs(amount.get<double>()) <= 100))
      refuse("logit_bias." + name, "logit_bias." + name + " is " + shown(amount) + ", expected is -100 to 100");
    bias.emplace_back(token, amount.get<float>());
  }
}

std::string read_format(Fields& fields, std::string_view body) {
  const Json* value = fields.find("response_format");
  if (!value) return "";
  if (!value->is_object()) fields.wrong("response_format", *value, "an object with a type");
  Fields format(*value, "response_format");
  const std::string type = format.string("type", "", 64);
  if (type == "text") return "";
  if (type == "json_object") return json_object_grammar();
  if (type != "json_schema") format.wrong("type", Json(type), "\"text\", \"json_object\" or \"json_schema\"");
  const Json* named = format.find("json_schema");
  if (!named || !named->is_object())
    refuse("response_format.json_schema", "response_format.json_schema is missing");
  // Once more, with the order of properties as it was written: answers have it, too.
  const OrderedJson ordered = OrderedJson::parse(body);
  const OrderedJson& schema = ordered["response_format"]["json_schema"];
  if (!schema.contains("schema"))
    refuse("response_format.json_schema.schema", "response_format.json_schema.schema is missing");
  auto grammar = schema_grammar(schema["schema"], "response_format.json_schema.schema");
  if (auto* error = std::get_if<ApiError>(&grammar)) throw Refused{std::move(*error)};
  return std::get<std::string>(grammar);
}

// --- messages ----------------------------------------------------------------------------------------------------
std::string read_content(const Json& message, const std::string& where, bool may_be_missing) {
  const auto at = message.find("content");
  if (at == message.end() || at->is_null()) {
    if (may_be_missing) return "";
    refuse(where + ".content", where + ".content is missing");
  }
  if (at->is_string()) return at->get<std::string>();
  if (!at->is_array()) refuse(where + ".content", where + ".content is " + shown(*at) + ", expected is text");
  std::string text;
  for (size_t i = 0; i < at->size(); ++i) {
    const Json& part = (*at)[i];
    const std::string path = where + ".content[" + std::to_string(i) + "]";
    if (!part.is_object() || !part.contains("type") || !part["type"].is_string())
      refuse(path, path + " is " + shown(part) + ", expected is an object with a type");
    if (part["type"] != "text")
      refuse(path + ".type", path + ".type is " + shown(part["type"]) + "; this server reads \"text\" only");
    if (!part.contains("text") || !part["text"].is_string())
      refuse(path + ".text", path + ".text is missing or no string");
    text += part["text"].get<std::string>();
  }
  return text;
}

// What the template knows: system, user, assistant. A tool's result comes to the model as a user's message, a call
// of a tool as the assistant's own words.
std::vector<engine::ChatMessage> read_messages(Fields& fields) {
  const Json* list = fields.find("messages");
  if (!list) refuse("messages", "messages is missing");
  if (!list->is_array() || list->empty()) fields.wrong("messages", *list, "a list of at least one message");
  std::vector<engine::ChatMessage> messages;
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& message = (*list)[i];
    const std::string where = "messages[" + std::to_string(i) + "]";
    if (!message.is_object()) refuse(where, where + " is " + shown(message) + ", expected is an object");
    const auto role_at = message.find("role");
    if (role_at == message.end() || !role_at->is_string())
      refuse(where + ".role",
             where + ".role is missing or no string; allowed are system, developer, user, assistant, tool");
    auto role = role_at->get<std::string>();
    const bool calls = message.contains("tool_calls") && message["tool_calls"].is_array();
    std::string content = read_content(message, where, role == "assistant" && calls);
    if (role == "developer") role = "system";
    if (role == "assistant" && calls) {
      for (const Json& call : message["tool_calls"]) {
        if (!call.is_object()) refuse(where + ".tool_calls", where + ".tool_calls is a list of objects");
        if (!content.empty()) content += "\n";
        content += call.value("function", Json::object()).dump(-1, ' ', false, Json::error_handler_t::replace);
      }
    }
    if (role == "tool" || role == "function") role = "user";
    if (role != "system" && role != "user" && role != "assistant") {
      refuse(where + ".role",
             where + ".role is " + shown(*role_at) + "; allowed are system, developer, user, assistant, tool");
    }
    messages.push_back({role, std::move(content)});
  }
  return messages;
}

std::vector<int32_t> tokenized(const std::string& text, const engine::Text& vocabulary, const std::string& param) {
  auto tokens = vocabulary.tokenize(text, true, true);
  if (!tokens.ok()) throw Refused{api_error(tokens.status(), param)};
  return *std::move(tokens);
}

std::vector<int32_t> token_ids(const Json& list, int64_t vocab_size, const std::string& param) {
  std::vector<int32_t> tokens;
  for (const Json& one : list) {
    if (!one.is_number_integer() || one < 0 || one >= vocab_size) {
      refuse(param,
             param + " has " + shown(one) + ", expected are token ids from 0 to " + std::to_string(vocab_size - 1));
    }
    tokens.push_back(one.get<int32_t>());
  }
  return tokens;
}

// A text, a list of texts, a list of token ids, or a list of such lists.
std::vector<std::vector<int32_t>> read_prompts(Fields& fields, const engine::Text& text) {
  const Json* prompt = fields.find("prompt");
  if (!prompt) refuse("prompt", "prompt is missing");
  const std::string expected =
      "a text, a list of token ids, or a list of up to " + std::to_string(kMaxPrompts) + " of these";
  if (prompt->is_string()) return {tokenized(prompt->get<std::string>(), text, "prompt")};
  if (!prompt->is_array() || prompt->empty()) fields.wrong("prompt", *prompt, expected);
  if ((*prompt)[0].is_number()) return {token_ids(*prompt, text.vocab_size(), "prompt")};
  if (std::ssize(*prompt) > kMaxPrompts) fields.wrong("prompt", *prompt, expected);
  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < prompt->size(); ++i) {
    const std::string where = "prompt[" + std::to_string(i) + "]";
    if ((*prompt)[i].is_string()) {
      prompts.push_back(tokenized((*prompt)[i].get<std::string>(), text, where));
    } else if ((*prompt)[i].is_array()) {
      prompts.push_back(token_ids((*prompt)[i], text.vocab_size(), where));
    } else {
      fields.wrong("prompt", *prompt, expected);
    }
  }
  return prompts;
}

void read_sampling(Fields& fields, const RequestLimits& limits, int64_t vocab_size,
                   engine::SamplingOptions& sampling) {
  sampling = limits.sampling;
  fields.number("temperature", 0, 100, sampling.temperature);
  fields.number("top_p", 0, 1, sampling.top_p);
  fields.number("min_p", 0, 1, sampling.min_p);
  fields.number("presence_penalty", -2, 2, sampling.presence_penalty);
  fields.number("frequency_penalty", -2, 2, sampling.frequency_penalty);
  fields.number("repetition_penalty", 0.1, 10, sampling.repeat_penalty);
  fields.number("repeat_penalty", 0.1, 10, sampling.repeat_penalty);
  // -1 and 0: all tokens, as other servers have it.
  if (const auto top_k = fields.whole("top_k", -1, INT32_MAX))
    sampling.top_k = static_cast<int>(std::max<int64_t>(*top_k, 0));
  sampling.seed = read_seed(fields);
  read_bias(fields, sampling.logit_bias, vocab_size);
}

CompletionRequest read(Endpoint endpoint, std::string_view body, const Json& json, const engine::Text& text,
                       const RequestLimits& limits) {
  Fields fields(json);
  CompletionRequest out{.endpoint = endpoint};
  out.model = fields.string("model", limits.models.front(), 256);
  if (std::find(limits.models.begin(), limits.models.end(), out.model) == limits.models.end()) {
    std::string names;
    for (const std::string& name : limits.models) names += (names.empty() ? "" : ", ") + name;
    throw Refused{{.status = 404,
                   .message = "model " + shown(Json(out.model)) + " is not served here; there is: " + names,
                   .param = "model",
                   .code = "model_not_found"}};
  }

  engine::ServeRequest request;
  read_sampling(fields, limits, text.vocab_size(), request.answer.sampling);
  request.answer.sampling.grammar = read_format(fields, body);
  read_stop(fields, request.answer.stop);
  request.n = fields.whole("n", 1, limits.max_choices).value_or(1);
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  const auto max_tokens = fields.whole("max_tokens", 1, kAny);
  const auto max_completion_tokens = fields.whole("max_completion_tokens", 1, kAny);
  request.answer.max_tokens =
      Tokens(max_completion_tokens ? *max_completion_tokens : max_tokens.value_or(limits.max_tokens.n));
  request.answer.ignore_end = fields.boolean("ignore_eos", false);
  request.name_space = fields.string("cache_salt", "", kMaxSaltBytes);
  out.user = fields.string("user", "", 256);
  out.stream = fields.boolean("stream", false);
  if (const Json* options = fields.find("stream_options")) {
    if (!options->is_object()) fields.wrong("stream_options", *options, "an object");
    if (!out.stream) refuse("stream_options", "stream_options is only allowed with stream: true");
    Fields inner(*options, "stream_options");
    out.include_usage = inner.boolean("include_usage", false);
    for (const std::string& name : inner.rest()) out.ignored.push_back(name);
  }

  const auto is_empty = [](const Json& value) { return value.empty(); };
  const auto is_false = [](const Json& value) { return value == false; };
  fields.unsupported("tools", "this server does not call tools; leave the field out", is_empty);
  fields.unsupported("functions", "this server does not call functions; leave the field out", is_empty);
  fields.unsupported("tool_choice", "this server does not call tools",
                     [](const Json& value) { return value == "none" || value == "auto"; });
  fields.unsupported("function_call", "this server does not call functions",
                     [](const Json& value) { return value == "none" || value == "auto"; });
  fields.unsupported("modalities", "this server answers with text only",
                     [](const Json& value) { return value == Json::array({"text"}); });
  fields.unsupported("audio", "this server answers with text only", is_empty);

  if (endpoint == Endpoint::kChat) {
    out.logprobs = fields.boolean("logprobs", false);
    const auto top = fields.whole("top_logprobs", 0, 20);
    if (top && !out.logprobs) refuse("top_logprobs", "top_logprobs is only allowed with logprobs: true");
    if (out.logprobs) request.top_logprobs = top.value_or(0);
    auto tokens = text.tokenize_chat(read_messages(fields));
    if (!tokens.ok()) throw Refused{api_error(tokens.status(), "messages")};
    request.prompt = *std::move(tokens);
    request.answer.own_text = true;
    out.prompts.push_back(std::move(request));
  } else {
    if (const auto top = fields.whole("logprobs", 0, 20)) {
      out.logprobs = true;
      request.top_logprobs = *top;
    }
    fields.unsupported("echo", "this server does not repeat the prompt", is_false);
    fields.unsupported("suffix", "this server does not fill in between texts", is_empty);
    fields.unsupported("best_of", "only best_of equal to n is supported",
                       [&](const Json& value) { return value.is_number_integer() && value == request.n; });
    for (auto& prompt : read_prompts(fields, text)) {
      out.prompts.push_back(request);
      out.prompts.back().prompt = std::move(prompt);
    }
    if (std::ssize(out.prompts) * request.n > limits.max_choices) {
      refuse("prompt", std::to_string(out.prompts.size()) + " prompts with n " + std::to_string(request.n) +
                           " are more than " + std::to_string(limits.max_choices) + " choices");
    }
  }
  const std::string prompt_field = endpoint == Endpoint::kChat ? "messages" : "prompt";
  for (const engine::ServeRequest& one : out.prompts) {
    if (Status s = engine::check_prompt(one.prompt, limits.context, text.vocab_size()); !s.ok()) {
      ApiError error = api_error(s, prompt_field);
      error.message = prompt_field + ": " + error.message;
      if (std::ssize(one.prompt) >= limits.context.n) error.code = "context_length_exceeded";
      throw Refused{std::move(error)};
    }
  }
  for (const std::string& name : fields.rest()) out.ignored.push_back(name);
  return out;
}

}  // namespace

CompletionResult read_completion(Endpoint endpoint, std::string_view body, const engine::Text& text,
                                 const RequestLimits& limits) {
  auto json = parse_object(body);
  if (auto* error = std::get_if<ApiError>(&json)) return std::move(*error);
  try {
    return read(endpoint, body, std::get<Json>(json), text, limits);
  } catch (Refused& refused) {
    return std::move(refused.error);
  }
}

}  // namespace pagedkv::server
