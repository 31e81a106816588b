// PKV_CHECK guards what only a bug of ours can break; it is never reachable from input.
#pragma once

#include <cstdio>
#include <cstdlib>

#define PKV_CHECK(condition)                                                                 \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: broken invariant: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (0)
