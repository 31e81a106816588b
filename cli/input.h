// Text from outside: files, stdin, words of the command line. All of it is checked to be UTF-8.
#pragma once

#include <cstddef>
#include <string>

#include "pagedkv/status.h"

namespace pagedkv::cli {

inline constexpr size_t kMaxTextBytes = size_t{64} << 20;

// The content of a file, "-": stdin, without one newline at its end. `what` begins every message: "[prompt] ...".
// Errors: kNotFound, kUnavailable, kInvalidArgument (a directory, empty, too long, not UTF-8).
Result<std::string> read_text(const std::string& what, const std::string& path);

// kInvalidArgument with the offset and value of the first byte that is not UTF-8; `name` says whose text it is.
Status check_utf8(const std::string& what, const std::string& name, const std::string& text);

}  // namespace pagedkv::cli
