#include "server/messages.h"

#include <string>
#include <utility>

namespace pagedkv::server {
namespace {

ApiError wrong(const std::string& param, const std::string& what) {
  return {.message = param + what, .param = param};
}

ApiResult<std::string> read_content(const Json& message, const std::string& where, bool may_be_missing) {
  const auto at = message.find("content");
  if (at == message.end() || at->is_null()) {
    if (may_be_missing) return std::string();
    return wrong(where + ".content", " is missing");
  }
  if (at->is_string()) return at->get<std::string>();
  if (!at->is_array()) return wrong(where + ".content", " is " + shown(*at) + ", expected is text");
  std::string text;
  for (size_t i = 0; i < at->size(); ++i) {
    const Json& part = (*at)[i];
    const std::string path = where + ".content[" + std::to_string(i) + "]";
    if (!part.is_object() || !part.contains("type") || !part["type"].is_string())
      return wrong(path, " is " + shown(part) + ", expected is an object with a type");
    if (part["type"] == "refusal" && part.contains("refusal") && part["refusal"].is_string()) {
      text += part["refusal"].get<std::string>();
      continue;
    }
    if (part["type"] != "text")
      return wrong(path + ".type", " is " + shown(part["type"]) + "; this server reads \"text\" only");
    if (!part.contains("text") || !part["text"].is_string())
      return wrong(path + ".text", " is missing or no string");
    text += part["text"].get<std::string>();
  }
  return text;
}

ApiResult<engine::ChatMessage> read_message(const Json& message, const std::string& where) {
  static const std::string allowed = "; allowed are system, developer, user, assistant, tool";
  if (!message.is_object()) return wrong(where, " is " + shown(message) + ", expected is an object");
  const auto role_at = message.find("role");
  if (role_at == message.end() || !role_at->is_string())
    return wrong(where + ".role", " is missing or no string" + allowed);
  auto role = role_at->get<std::string>();
  const bool own = role == "assistant";
  const bool calls = own && message.contains("tool_calls") && message["tool_calls"].is_array();
  const bool call = own && message.contains("function_call") && message["function_call"].is_object();
  const bool refuses = own && message.contains("refusal") && message["refusal"].is_string();
  auto content = read_content(message, where, calls || call || refuses);
  if (!content.ok()) return content.error();
  const auto add = [&](const std::string& words) { *content += (content->empty() ? "" : "\n") + words; };
  if (refuses) add(message["refusal"].get<std::string>());
  if (call) add(dump(OrderedJson(message["function_call"])));  // the older form
  if (role == "developer") role = "system";
  if (calls) {
    for (const Json& one : message["tool_calls"]) {
      if (!one.is_object()) return wrong(where + ".tool_calls", " is a list of objects");
      add(dump(OrderedJson(one.value("function", Json::object()))));
    }
  }
  if (role == "tool" || role == "function") role = "user";
  if (role != "system" && role != "user" && role != "assistant")
    return wrong(where + ".role", " is " + shown(*role_at) + allowed);
  return engine::ChatMessage{role, *std::move(content)};
}

}  // namespace

ApiResult<std::vector<engine::ChatMessage>> read_messages(const Json* messages) {
  if (!messages) return wrong("messages", " is missing");
  if (!messages->is_array() || messages->empty())
    return wrong("messages", " is " + shown(*messages) + ", expected is a list of at least one message");
  std::vector<engine::ChatMessage> out;
  for (size_t i = 0; i < messages->size(); ++i) {
    auto message = read_message((*messages)[i], "messages[" + std::to_string(i) + "]");
    if (!message.ok()) return message.error();
    out.push_back(*std::move(message));
  }
  return out;
}

}  // namespace pagedkv::server
