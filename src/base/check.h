// PKV_CHECK guards what only a bug of ours can break; it is never reachable from input.
#pragma once

#include <cstdio>
#include <cstdlib>

// PKV_REQUIRES guards a stated precondition of a public call: debug builds stop at a caller that breaks it, release
// builds go on, and the code behind it must then stay inside its own memory.
#ifdef NDEBUG
#define PKV_REQUIRES(condition) static_cast<void>(0)
#else
#define PKV_REQUIRES(condition) PKV_CHECK(condition)
#endif

#define PKV_CHECK(condition)                                                                 \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (0)
