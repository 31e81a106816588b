#include "server/api_error.h"

#include <nlohmann/json.hpp>

namespace pagedkv::server {

using nlohmann::ordered_json;

namespace {

constexpr size_t kMaxMessage = 997, kMaxParam = 197;  // bytes: no client gets its own body back

}  // namespace

std::string shortened(std::string_view text, size_t most) {
  if (text.size() <= most) return std::string(text);
  while (most > 0 && (text[most] & 0xc0) == 0x80) --most;
  return std::string(text.substr(0, most)) + "...";
}

std::string error_json(const ApiError& error) {
  const auto or_null = [](const std::string& text) {
    return text.empty() ? ordered_json() : ordered_json(shortened(text, kMaxParam));
  };
  const ordered_json body = {{"error",
                              {{"message", shortened(error.message, kMaxMessage)},
                               {"type", error.type},
                               {"param", or_null(error.param)},
                               {"code", or_null(error.code)}}}};
  return body.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

HttpReply error_reply(const ApiError& error) {
  HttpReply reply{
      .status = error.status, .body = error_json(error), .reason = shortened(error.message, kMaxMessage)};
  if (error.status == 429 || error.status == 503) reply.headers.emplace_back("Retry-After", "1");
  if (error.status == 401) reply.headers.emplace_back("WWW-Authenticate", "Bearer");
  return reply;
}

ApiError api_error(const Status& status, std::string param) {
  ApiError error{.message = status.message(), .param = std::move(param)};
  switch (status.code()) {
    case Code::kInvalidArgument:
    case Code::kUnsupported:
      return error;
    case Code::kCapacity:
      error.status = 429;
      error.type = "rate_limit_error";
      error.code = "queue_full";
      return error;
    case Code::kUnavailable:
      error.status = 503;
      error.type = "service_unavailable_error";
      return error;
    case Code::kNoMemory:
      error.status = 503;
      error.type = "service_unavailable_error";
      error.code = "out_of_memory";
      return error;
    default:
      error.status = 500;
      error.type = "server_error";
      return error;
  }
}

}  // namespace pagedkv::server
