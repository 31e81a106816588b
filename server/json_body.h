// Bodies as JSON: strict, of limited depth, read in one pass, with errors that say where.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string_view>

#include "server/api_error.h"

namespace pagedkv::server {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

inline constexpr int kMaxJsonDepth = 64;

// Whether the client left, so that nobody wants the result any more. May be empty: it stays.
using Gone = std::function<bool()>;
ApiError client_left();

// The object that a body must be. Of a name that is given twice the last value counts. Errors: also client_left().
ApiResult<Json> parse_object(std::string_view body, const Gone& gone = {});

// The same with names in the order in which they are written. Looking a name up takes as long as there are names.
ApiResult<OrderedJson> parse_ordered_object(std::string_view body, const Gone& gone = {});

// Text that is valid UTF-8 whatever the strings in `json` are.
std::string dump(const OrderedJson& json);

}  // namespace pagedkv::server
