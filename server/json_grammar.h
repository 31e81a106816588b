// From a JSON schema to a grammar (GBNF) that derives just the JSON texts the schema allows.
#pragma once

#include <string>

#include "server/api_error.h"
#include "server/json_body.h"

namespace pagedkv::server {

// Any JSON object.
std::string json_object_grammar();

// Understood: type (also a list), properties, required, additionalProperties, items, prefixItems, minItems,
// maxItems, enum, const, anyOf, oneOf, allOf of one, minLength, maxLength, minimum 0 of integers, $ref within the
// schema, and what only describes (title, description, default, examples, ...). Objects have their properties in
// the schema's order. Anything else would not be obeyed: the error names it and where. `param` begins the errors'
// field name.
ApiResult<std::string> schema_grammar(const OrderedJson& schema, const std::string& param);

}  // namespace pagedkv::server
