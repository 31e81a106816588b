// The one reader of environment variables. Values are read at each call, never cached.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "pagedkv/status.h"

namespace pagedkv {

struct EnvValue {
  const char* name;  // the variable that was set
  std::string value;
};

// The first of `names` that is set; set but empty counts as unset.
std::optional<EnvValue> env_first(std::initializer_list<const char*> names);

// The first of `names` that is set, as 1/true/yes/on or 0/false/no/off in any case; `fallback` when none is.
// Errors: kInvalidArgument with the variable, its value and what is allowed.
Result<bool> env_flag(std::initializer_list<const char*> names, bool fallback);

}  // namespace pagedkv
