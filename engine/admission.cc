#include "engine/admission.h"

#include <algorithm>

namespace pagedkv::engine {
namespace {

constexpr int64_t kMostPassed = 8;  // times that a sequence without room lets smaller ones go first

bool fits(const Room& room, const Need& need) {
  if (need.choices > room.sequences) return false;
  if (room.nobody_runs) return true;  // nothing to wait for: all there is is there now
  return need.to_compute.n + need.choices * room.growth.n + room.promised.n <= need.available.n;
}

}  // namespace

Verdict judge(const Room& room, const Need& need) {
  if (fits(room, need)) return Verdict::kAdmit;
  return need.times_passed < kMostPassed ? Verdict::kLetPass : Verdict::kHoldAll;
}

Tokens soon_cached(std::span<const PrefixKey> keys, std::span<const PrefixKey> others, Tokens computed,
                   Tokens block_size) {
  const auto same = std::mismatch(keys.begin(), keys.end(), others.begin(), others.end()).first - keys.begin();
  return computed.n / block_size.n < same ? Tokens(same * block_size.n) : Tokens(0);
}

}  // namespace pagedkv::engine
