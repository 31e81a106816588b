// Time as the engine measures it.
#pragma once

#include <chrono>

namespace pagedkv::engine {

using Clock = std::chrono::steady_clock;
inline double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace pagedkv::engine
