// From a JSON schema to a grammar (GBNF) that derives just JSON texts that the schema allows.
#pragma once

#include <string>

#include "server/api_error.h"
#include "server/json_body.h"

namespace pagedkv::server {

// Any JSON object.
std::string json_object_grammar();

// What is understood, and what of it is written, says docs/server.md. Anything else would not be obeyed: the error
// names it and where. `param` begins the errors' field name. Takes bounded time and memory.
ApiResult<std::string> schema_grammar(const OrderedJson& schema, const std::string& param);

}  // namespace pagedkv::server
