// What went wrong, in the shape that OpenAI's clients read.
#pragma once

#include <string>

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

std::string error_json(const ApiError& error);  // {"error": {...}}
HttpReply error_reply(const ApiError& error);   // 429 and 503 tell when to try again
// kInvalidArgument: 400. kCapacity: 429 (a full queue). kUnavailable: 503. kNoMemory: 503, out_of_memory. Others:
// 500.
ApiError api_error(const Status& status, std::string param = "");

}  // namespace pagedkv::server
