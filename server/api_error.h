// What went wrong, in the shape that OpenAI's clients read.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "pagedkv/status.h"
#include "server/http.h"

namespace pagedkv::server {

struct ApiError {
  int status = 400;
  std::string message;
  std::string type = "invalid_request_error";
  std::string param;  // the field that is wrong, "messages[0].content"; empty: none
  std::string code;   // "model_not_found"; empty: none
};

// A value, or why the client gets none.
template <typename T>
class ApiResult {
 public:
  ApiResult(T value) : held_(std::move(value)) {}         // NOLINT: a value is a result
  ApiResult(ApiError error) : held_(std::move(error)) {}  // NOLINT: so is an error
  bool ok() const { return std::holds_alternative<T>(held_); }
  const ApiError& error() const { return std::get<ApiError>(held_); }  // not ok()
  T& operator*() { return std::get<T>(held_); }
  const T& operator*() const { return std::get<T>(held_); }
  T* operator->() { return &**this; }
  const T* operator->() const { return &**this; }

 private:
  std::variant<T, ApiError> held_;
};

// The first `most` bytes of a text or a few fewer, cut between characters, and "..." for the rest.
std::string shortened(std::string_view text, size_t most);
std::string error_json(const ApiError& error);  // {"error": {...}}
HttpReply error_reply(const ApiError& error);   // 429 and 503 tell when to try again
// kInvalidArgument: 400. kCapacity: 429 (a full queue). kUnavailable: 503. kNoMemory: 503, out_of_memory. Others:
// 500.
ApiError api_error(const Status& status, std::string param = "");

}  // namespace pagedkv::server
