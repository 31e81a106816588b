// What a request line names: a path and a query, and whose they are.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace pagedkv::server {

struct Target {
  std::string path;                                        // percent-decoded
  std::vector<std::pair<std::string, std::string>> query;  // the same, in order
  std::string authority;  // "host:port" of a target that begins with http://; it counts before the header Host
};

// Of "/path?query", "http://host/path?query" or "*". None: it is no such thing.
std::optional<Target> read_target(std::string_view target);

// The host of "host:port", in lower case and without the brackets of an IPv6 address; none: it is no such thing.
std::optional<std::string> host_of(std::string_view authority);

}  // namespace pagedkv::server
