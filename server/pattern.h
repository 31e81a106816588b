// Regular expressions of a schema's `pattern`, and of the formats we know, as automata.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "pagedkv/status.h"
#include "server/automaton.h"

namespace pagedkv::server {

// The texts in which `pattern` is found somewhere, as ECMA-262 with the flag u reads it: literals, classes, \d \w
// \s and their opposites, groups, |, * + ? {m,n} also lazy, ^ and $. Empty: no text fits. Errors: kInvalidArgument
// for what is no such pattern, what no automaton can follow (backreferences, lookaround, word borders, \p), and
// what grows past Automaton::kMaxStates.
Result<Automaton> pattern_automaton(std::string_view pattern);

// The pattern of a string `format`; nullopt: one that we do not know.
std::optional<std::string> format_pattern(std::string_view format);

}  // namespace pagedkv::server
