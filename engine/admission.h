// Who of those that wait may run now: decisions over plain values, for one request after the other in the order of
// arrival. Nothing is changed; any thread.
#pragma once

#include <cstdint>
#include <span>

#include "pagedkv/cache.h"
#include "pagedkv/units.h"

namespace pagedkv::engine {

// What is left beside the sequences that run.
struct Room {
  int64_t sequences = 0;  // that may run beside them
  bool nobody_runs = false;
  Tokens promised{
      0};            // that those that run are still to take: what is pending of them, and `growth` of each choice
  Tokens growth{0};  // what is kept for each choice to grow by, until others have to give way
};

// What a waiting sequence asks for.
struct Need {
  int64_t choices = 1;  // sequences that will come of it, itself included
  Tokens to_compute{0};
  Tokens available{0};       // in the pool, beside the cached blocks that it would take over
  int64_t times_passed = 0;  // by others that came later
};

enum class Verdict : uint8_t {
  kAdmit,
  kLetPass,  // it does not fit, smaller ones behind it may
  kHoldAll,  // it does not fit, and was passed often enough: all behind it wait too
};
Verdict judge(const Room& room, const Need& need);

// Leading tokens of a prompt that will be cached soon, since another prompt that begins alike is being computed; 0
// when that part of the other is stored already.
//   keys, others  of the two prompts' full blocks
//   computed      leading tokens of the other prompt whose K and V are stored
Tokens soon_cached(std::span<const PrefixKey> keys, std::span<const PrefixKey> others, Tokens computed,
                   Tokens block_size);

}  // namespace pagedkv::engine
