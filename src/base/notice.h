// Notices of the library: what was asked and not done, told once through the process's log sink.
#pragma once

#include <string_view>

namespace pagedkv {

void notice(std::string_view message);

}  // namespace pagedkv
