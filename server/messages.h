// The conversation of a chat request, as the model's template takes it.
#pragma once

#include <vector>

#include "engine/text.h"
#include "server/api_error.h"
#include "server/fields.h"

namespace pagedkv::server {

// What the template knows: system, user, assistant. A tool's result comes to the model as a user's message, a call
// of a tool as the assistant's own words.
ApiResult<std::vector<engine::ChatMessage>> read_messages(const Json* messages);

}  // namespace pagedkv::server
