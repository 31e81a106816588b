// What a fuzzer claims of every input.
#pragma once

#include <cstdlib>

inline void require(bool claim) {
  if (!claim) std::abort();
}
