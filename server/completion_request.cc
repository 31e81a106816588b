#include "server/completion_request.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <random>
#include <utility>

#include "server/fields.h"
#include "server/json_grammar.h"
#include "server/messages.h"

namespace pagedkv::server {
namespace {

constexpr int64_t kMaxPrompts = 64;
constexpr size_t kMaxStops = 16;
constexpr size_t kMaxStopBytes = 1024;
constexpr size_t kMaxBiases = 1024;
constexpr size_t kMaxSaltBytes = 256;
constexpr size_t kMaxGrammarBytes = 64 << 10;

void read_stop(Fields& fields, std::vector<std::string>& stop) {
  const Json* value = fields.find("stop");
  if (!value) return;
  const std::string expected = "a string, or a list of at most " + std::to_string(kMaxStops) +
                               " strings, none empty or longer than " + std::to_string(kMaxStopBytes) + " bytes";
  if (value->is_string()) {
    stop.push_back(value->get<std::string>());
  } else if (value->is_array() && value->size() <= kMaxStops) {
    for (const Json& one : *value) {
      if (!one.is_string()) return fields.wrong("stop", *value, expected);
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
  if (value->is_number_integer()) return uint64_t(value->get<int64_t>());
  constexpr double kExact = 9007199254740992;  // 2^53: past it a double is no certain whole number
  const double number = value->is_number_float() ? value->get<double>() : kExact * 2;
  if (std::floor(number) != number || std::abs(number) > kExact) {
    fields.wrong("seed", *value, "a whole number from -2^63 to 2^64 - 1");
    return 0;
  }
  return uint64_t(int64_t(number));
}

void read_bias(Fields& fields, std::vector<std::pair<int32_t, float>>& bias, int64_t vocab_size) {
  const Json* value = fields.find("logit_bias");
  if (!value) return;
  const std::string expected =
      "an object of at most " + std::to_string(kMaxBiases) + " token ids, each with a number from -100 to 100";
  if (!value->is_object() || value->size() > kMaxBiases) return fields.wrong("logit_bias", *value, expected);
  for (const auto& [name, amount] : value->items()) {
    int32_t token = -1;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), token);
    // Just as the id is written: neither " 5" nor "05", which would be a second word for 5.
    const bool whole = error == std::errc() && end == name.data() + name.size();
    if (!whole || token < 0 || token >= vocab_size || std::to_string(token) != name) {
      return fields.refuse("logit_bias", "logit_bias has \"" + name.substr(0, 40) +
                                             "\", expected are token ids from 0 to " +
                                             std::to_string(vocab_size - 1));
    }
    if (!amount.is_number() || !(std::abs(amount.get<double>()) <= 100)) {
      return fields.refuse("logit_bias." + name,
                           "logit_bias." + name + " is " + shown(amount) + ", expected is -100 to 100");
    }
    bias.emplace_back(token, amount.get<float>());
  }
}

// The grammar that is asked for, or "".
ApiResult<std::string> read_format(const Json* value, std::string_view body, const Gone& gone) {
  if (!value) return std::string();
  const std::string param = "response_format";
  const auto wrong = [](const std::string& where, const std::string& what) {
    return ApiError{.message = where + what, .param = where};
  };
  if (!value->is_object()) return wrong(param, " is " + shown(*value) + ", expected is an object with a type");
  std::optional<ApiError> error;
  Fields format(*value, error, param);
  const std::string type = format.string("type", "", 64);
  if (error) return *error;
  if (type == "text") return std::string();
  if (type == "json_object") return json_object_grammar();
  if (type != "json_schema") {
    return wrong(param + ".type",
                 " is " + shown(Json(type)) + ", expected is \"text\", \"json_object\" or \"json_schema\"");
  }
  const Json* named = format.find("json_schema");
  if (!named || !named->is_object()) return wrong(param + ".json_schema", " is missing");
  // Once more, with the order of properties as it was written: answers have it, too.
  const auto ordered = parse_ordered_object(body, gone);
  if (!ordered.ok()) return ordered.error();
  const OrderedJson& schema = (*ordered)["response_format"]["json_schema"];
  if (!schema.contains("schema")) return wrong(param + ".json_schema.schema", " is missing");
  return schema_grammar(schema["schema"], param + ".json_schema.schema");
}

using Tokenized = ApiResult<std::vector<int32_t>>;

// What prompts are read with.
struct Reader {
  const engine::Text& text;
  Tokens context;
  const Gone& gone;
};

// `n`: how many tokens, in words.
ApiError too_long(const std::string& n, Tokens context, const std::string& param) {
  return {.message = param + ": prompt is too long: it has " + n + " tokens, the context is " +
                     std::to_string(context.n) + " and must hold an answer too",
          .param = param,
          .code = "context_length_exceeded"};
}

// A template may leave out the white space around a message.
int64_t inner_bytes(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  const size_t first = text.find_first_not_of(kSpace);
  return first == std::string_view::npos ? 0 : int64_t(text.find_last_not_of(kSpace) + 1 - first);
}

// Before a text costs more than reading it.
std::optional<ApiError> check_bytes(const Reader& reader, int64_t n_bytes, const std::string& param) {
  if (reader.gone && reader.gone()) return client_left();
  const int64_t least = n_bytes / reader.text.longest_piece();
  if (least < reader.context.n) return std::nullopt;
  return too_long("at least " + std::to_string(least), reader.context, param);
}

Tokenized tokenized(Result<std::vector<int32_t>>&& tokens, const std::string& param) {
  if (!tokens.ok()) return api_error(tokens.status(), param);
  return *std::move(tokens);
}

// A text, a list of texts, a list of token ids, or a list of such lists.
ApiResult<std::vector<std::vector<int32_t>>> read_prompts(const Json* prompt, const Reader& reader) {
  if (!prompt) return ApiError{.message = "prompt is missing", .param = "prompt"};
  const auto wrong = [&] {
    return ApiError{.message = "prompt is " + shown(*prompt) +
                               ", expected is a text, a list of token ids, or a list of up to " +
                               std::to_string(kMaxPrompts) + " of these",
                    .param = "prompt"};
  };
  const auto read = [&](const Json& one, const std::string& where) -> Tokenized {
    if (one.is_string()) {
      const auto& words = one.get_ref<const std::string&>();
      if (const auto error = check_bytes(reader, std::ssize(words), where)) return *error;
      return tokenized(reader.text.tokenize(words, true, true), where);
    }
    if (one.is_array() && std::ssize(one) >= reader.context.n)
      return too_long(std::to_string(one.size()), reader.context, where);
    if (one.is_array()) return token_ids(one, reader.text.vocab_size(), where);
    return wrong();
  };
  const bool several = prompt->is_array() && !prompt->empty() && !(*prompt)[0].is_number();
  const bool too_many = several && std::ssize(*prompt) > kMaxPrompts;
  if (too_many || (prompt->is_array() && prompt->empty())) return wrong();
  std::vector<std::vector<int32_t>> prompts;
  for (size_t i = 0; i < (several ? prompt->size() : 1); ++i) {
    auto one = several ? read((*prompt)[i], "prompt[" + std::to_string(i) + "]") : read(*prompt, "prompt");
    if (!one.ok()) return one.error();
    prompts.push_back(*std::move(one));
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
  if (const auto top_k = fields.whole("top_k", -1, INT32_MAX)) sampling.top_k = int(std::max<int64_t>(*top_k, 0));
  sampling.seed = read_seed(fields);
  read_bias(fields, sampling.logit_bias, vocab_size);
}

std::optional<ApiError> check_model(const std::string& model, const std::vector<std::string>& served) {
  if (std::find(served.begin(), served.end(), model) != served.end()) return std::nullopt;
  std::string names;
  for (const std::string& name : served) names += (names.empty() ? "" : ", ") + name;
  return ApiError{.status = 404,
                  .message = "model " + shown(Json(model)) + " is not served here; there is: " + names,
                  .param = "model",
                  .code = "model_not_found"};
}

// What holds for the whole answer: how long, how many, in which pieces.
void read_answer(Fields& fields, const RequestLimits& limits, engine::ServeRequest& request) {
  read_stop(fields, request.answer.stop);
  request.n = fields.whole("n", 1, limits.max_choices).value_or(1);
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  const auto max_tokens = fields.whole("max_tokens", 1, kAny);
  auto max_completion_tokens = fields.whole("max_completion_tokens", 1, kAny);
  // llama.cpp's word for it; -1: no limit.
  if (const auto n = fields.whole("n_predict", -1, kAny); n && *n > 0 && !max_completion_tokens)
    max_completion_tokens = n;
  request.answer.max_tokens =
      Tokens(max_completion_tokens ? *max_completion_tokens : max_tokens.value_or(limits.max_tokens.n));
  request.answer.ignore_end = fields.boolean("ignore_eos", false);
  request.name_space = fields.string("cache_salt", "", kMaxSaltBytes);
}

void read_stream(Fields& fields, std::optional<ApiError>& error, CompletionRequest& out) {
  out.stream = fields.boolean("stream", false);
  const Json* options = fields.find("stream_options");
  if (!options) return;
  if (!options->is_object()) return fields.wrong("stream_options", *options, "an object");
  if (!out.stream) fields.refuse("stream_options", "stream_options is only allowed with stream: true");
  Fields inner(*options, error, "stream_options");
  out.include_usage = inner.boolean("include_usage", false);
  for (const std::string& name : inner.rest()) out.ignored.push_back(name);
}

// Fields of other servers' that change the answer, and are not obeyed here.
void refuse_constraints(Fields& fields) {
  const auto is_off = [](const Json& value) {
    return value.empty() || value == 0 || value == false || (value.is_string() && shown(value) == "\"\"");
  };
  for (const char* name : {"guided_json",
                           "guided_regex",
                           "guided_choice",
                           "guided_grammar",
                           "structured_outputs",
                           "json_schema",
                           "grammar_lazy",
                           "min_tokens",
                           "stop_token_ids",
                           "bad_words",
                           "allowed_token_ids",
                           "logits_processors",
                           "use_beam_search",
                           "prompt_logprobs",
                           "truncate_prompt_tokens",
                           "include_stop_str_in_output",
                           "chat_template",
                           "chat_template_kwargs",
                           "continue_final_message",
                           "documents",
                           "input_prefix",
                           "input_suffix",
                           "mirostat",
                           "dry_multiplier",
                           "xtc_probability",
                           "n_probs",
                           "samplers"}) {
    fields.unsupported(name, "this server would not obey it; leave the field out (schemas: response_format)",
                       is_off);
  }
  const auto is_one = [](const Json& value) { return value == 1; };
  fields.unsupported("length_penalty", "this server has none", is_one);
  fields.unsupported("typical_p", "this server has none", is_one);
  fields.unsupported("skip_special_tokens", "special tokens are never shown",
                     [](const Json& value) { return value == true; });
  fields.unsupported("add_generation_prompt", "the prompt always ends with the assistant's turn",
                     [](const Json& value) { return value == true; });
}

// What clients and routers send along and nobody counts on: it changes no answer, and is not told as ignored.
void pass_over(Fields& fields) {
  for (const char* name :
       {"metadata", "store", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention",
        "safety_identifier", "cache_prompt", "id_slot", "guided_decoding_backend", "provider", "route",
        "transforms", "plugins", "usage", "litellm_metadata", "litellm_session_id"})
    fields.find(name);
}

// What a client counts on and would not get.
void refuse_unsupported(Fields& fields, Endpoint endpoint, int64_t n) {
  const auto is_empty = [](const Json& value) { return value.empty(); };
  const auto none_or_auto = [](const Json& value) { return value == "none" || value == "auto"; };
  fields.unsupported("tools", "this server does not call tools; leave the field out", is_empty);
  fields.unsupported("functions", "this server does not call functions; leave the field out", is_empty);
  fields.unsupported("tool_choice", "this server does not call tools", none_or_auto);
  fields.unsupported("function_call", "this server does not call functions", none_or_auto);
  fields.unsupported("modalities", "this server answers with text only",
                     [](const Json& value) { return value == Json::array({"text"}); });
  fields.unsupported("audio", "this server answers with text only", is_empty);
  refuse_constraints(fields);
  pass_over(fields);
  if (endpoint == Endpoint::kChat) return;
  fields.unsupported("echo", "this server does not repeat the prompt",
                     [](const Json& value) { return value == false; });
  fields.unsupported("suffix", "this server does not fill in between texts", is_empty);
  fields.unsupported("best_of", "only best_of equal to n is supported",
                     [&](const Json& value) { return value.is_number_integer() && value == n; });
}

void read_logprobs(Fields& fields, CompletionRequest& out, engine::ServeRequest& request) {
  if (out.endpoint == Endpoint::kCompletions) {
    if (const auto top = fields.whole("logprobs", 0, 20)) {
      out.logprobs = true;
      request.top_logprobs = *top;
    }
    return;
  }
  out.logprobs = fields.boolean("logprobs", false);
  const auto top = fields.whole("top_logprobs", 0, 20);
  if (top && !out.logprobs) fields.refuse("top_logprobs", "top_logprobs is only allowed with logprobs: true");
  if (out.logprobs) request.top_logprobs = top.value_or(0);
}

ApiResult<std::vector<std::vector<int32_t>>> read_chat(const Json* messages, const Reader& reader) {
  const auto read = read_messages(messages);
  if (!read.ok()) return read.error();
  int64_t n_bytes = 0;
  for (const engine::ChatMessage& message : *read) n_bytes += inner_bytes(message.content);
  if (const auto error = check_bytes(reader, n_bytes, "messages")) return *error;
  auto tokens = tokenized(reader.text.tokenize_chat(*read), "messages");
  if (!tokens.ok()) return tokens.error();
  return std::vector<std::vector<int32_t>>{*std::move(tokens)};
}

std::optional<ApiError> check_prompts(const std::vector<engine::ServeRequest>& prompts, const std::string& param,
                                      const engine::Text& text, const RequestLimits& limits) {
  if (std::ssize(prompts) * prompts.front().n > limits.max_choices) {
    return ApiError{.message = std::to_string(prompts.size()) + " prompts with n " +
                               std::to_string(prompts.front().n) + " are more than " +
                               std::to_string(limits.max_choices) + " choices",
                    .param = param};
  }
  for (const engine::ServeRequest& one : prompts) {
    const Status s = engine::check_prompt(one.prompt, limits.context, text.vocab_size());
    if (s.ok()) continue;
    if (std::ssize(one.prompt) >= limits.context.n)
      return too_long(std::to_string(one.prompt.size()), limits.context, param);
    ApiError error = api_error(s, param);
    error.message = param + ": " + error.message;
    return error;
  }
  return std::nullopt;
}

}  // namespace

ApiResult<std::vector<int32_t>> token_ids(const Json& list, int64_t vocab_size, const std::string& param) {
  std::vector<int32_t> tokens;
  for (const Json& one : list) {
    if (!one.is_number_integer() || one < 0 || one >= vocab_size) {
      return ApiError{.message = param + " has " + shown(one) + ", expected are token ids from 0 to " +
                                 std::to_string(vocab_size - 1),
                      .param = param};
    }
    tokens.push_back(one.get<int32_t>());
  }
  return tokens;
}

ApiResult<CompletionRequest> read_completion(Endpoint endpoint, std::string_view body, const engine::Text& text,
                                             const RequestLimits& limits, const Gone& gone) {
  const auto json = parse_object(body, gone);
  if (!json.ok()) return json.error();
  std::optional<ApiError> error;
  Fields fields(*json, error);
  CompletionRequest out{.endpoint = endpoint};
  out.model = fields.string("model", limits.models.front(), 256);
  if (!error) error = check_model(out.model, limits.models);
  if (error) return *error;

  engine::ServeRequest request;
  read_sampling(fields, limits, text.vocab_size(), request.answer.sampling);
  if (error) return *error;
  auto grammar = read_format(fields.find("response_format"), body, gone);
  if (!grammar.ok()) return grammar.error();
  const std::string own_grammar = fields.string("grammar", "", kMaxGrammarBytes);
  if (!own_grammar.empty() && !grammar->empty())
    fields.refuse("grammar", "grammar and response_format are given; an answer follows one of them");
  request.answer.sampling.grammar = own_grammar.empty() ? *std::move(grammar) : own_grammar;
  read_answer(fields, limits, request);
  out.user = fields.string("user", "", 256);
  read_stream(fields, error, out);
  refuse_unsupported(fields, endpoint, request.n);
  read_logprobs(fields, out, request);
  if (error) return *error;

  const bool chat = endpoint == Endpoint::kChat;
  const std::string prompt_field = chat ? "messages" : "prompt";
  request.answer.own_text = chat;
  const Reader reader{.text = text, .context = limits.context, .gone = gone};
  auto prompts = chat ? read_chat(fields.find("messages"), reader) : read_prompts(fields.find("prompt"), reader);
  if (!prompts.ok()) return prompts.error();
  for (std::vector<int32_t>& prompt : *prompts) {
    out.prompts.push_back(request);
    out.prompts.back().prompt = std::move(prompt);
  }
  error = check_prompts(out.prompts, prompt_field, text, limits);
  if (error) return *error;
  for (const std::string& name : fields.rest()) out.ignored.push_back(name);
  return out;
}

}  // namespace pagedkv::server
