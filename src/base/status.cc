#include "pagedkv/status.h"

namespace pagedkv {

const char* code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kCapacity:
      return "capacity";
    case Code::kNotFinite:
      return "not finite";
    case Code::kStale:
      return "stale handle";
    case Code::kNotFound:
      return "not found";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kNoMemory:
      return "no memory";
    case Code::kInternal:
      return "internal";
  }
  return "unknown";
}

}  // namespace pagedkv
