// The page at /: page.html, as one string.
#pragma once

#include <string_view>

namespace pagedkv::server {

extern const std::string_view kPage;

}  // namespace pagedkv::server
