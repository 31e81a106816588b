#include "server/json_body.h"

#include <string>

namespace pagedkv::server {
namespace {

struct TooDeep {};

}  // namespace

ApiResult<Json> parse_object(std::string_view body) {
  if (body.empty()) return ApiError{.message = "the body is empty, a JSON object is expected"};
  try {
    Json json = Json::parse(body, [](int depth, Json::parse_event_t, Json&) {
      if (depth > kMaxJsonDepth) throw TooDeep();
      return true;
    });
    if (json.is_object()) return json;
    return ApiError{.message = std::string("the body is a JSON ") + json.type_name() + ", an object is expected"};
  } catch (const TooDeep&) {
    return ApiError{.message = "the body is nested deeper than " + std::to_string(kMaxJsonDepth) + " levels"};
  } catch (const Json::exception& error) {
    return ApiError{.message = std::string("the body is not JSON: ") + error.what()};
  }
}

std::string dump(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace pagedkv::server
