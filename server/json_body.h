// Bodies as JSON: strict, of limited depth, with errors that say where.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "server/api_error.h"

namespace pagedkv::server {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

inline constexpr int kMaxJsonDepth = 64;

// The object that a body must be.
ApiResult<Json> parse_object(std::string_view body);

// Text that is valid UTF-8 whatever the strings in `json` are.
std::string dump(const OrderedJson& json);

}  // namespace pagedkv::server
