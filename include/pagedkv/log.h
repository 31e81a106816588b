// Where the library's rare notices go: a fallback, a clamped limit, a setting that does nothing.
#pragma once

#include <functional>
#include <string_view>

#include "pagedkv/export.h"

namespace pagedkv {

// Called from any thread; must not call back into the library. The default sink drops everything.
using LogSink = std::function<void(std::string_view message)>;

// Replaces the process-wide sink. Any thread.
PKV_API void set_log_sink(LogSink sink);

// Hands a message to the sink: for what is built on the library. Any thread.
PKV_API void notice(std::string_view message);

}  // namespace pagedkv
