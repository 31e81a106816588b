// What a cache knows of a prompt before anything is computed: keys of its blocks, and which of them are cached.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/export.h"
#include "pagedkv/units.h"

namespace pagedkv {

// Why (a part of) a prompt was not taken from the cache.
enum class PrefixReason : uint8_t {
  kHit,         // everything that can be reused was
  kNew,         // no block with these tokens after this prefix is known
  kEvicted,     // it was known, and made room for others
  kWindowGone,  // known for full attention, but a sliding-window group no longer holds its part
  kLastToken,   // the last prompt token is always computed
  kCollision,   // the key matched, the tokens did not
  kNoRoom,      // a partial hit needs a block to copy into, and there was none
  kOff,         // sharing is off for the cache or for this call
};
PKV_API const char* prefix_reason_name(PrefixReason reason);  // "hit", "new", "evicted", ...

// Names a full block's content and all that came before it: SHA-256, chained from the cache's descriptor and the
// namespace on.
struct PrefixKey {
  std::array<uint8_t, 32> bytes{};
  bool operator==(const PrefixKey&) const = default;
};

// A prompt looked up by Cache::match. Whoever waits with a prompt keeps it: the keys stay true, and what is cached
// is looked up again without hashing.
struct PrefixMatch {
  std::string name_space = {};         // prompts of different namespaces never share
  std::vector<PrefixKey> keys = {};    // of the prompt's full blocks
  Tokens cached{0};                    // leading tokens in whole cached blocks, when it was looked up
  std::vector<uint32_t> entries = {};  // those blocks, as the cache knows them
};

struct StartOptions {
  std::string_view name_space = {};  // tenant or salt. With a match: the match's counts
  bool reuse = true;                 // look for cached blocks
  bool store = true;                 // let later prompts reuse this sequence's blocks
  bool counted = true;               // in Stats::hits; off where a sequence that gave way is opened again
};

struct Started {
  SequenceId id;
  Tokens reused;        // leading prompt tokens that need no computation; always < prompt size
  PrefixReason reason;  // why not more
};

}  // namespace pagedkv
