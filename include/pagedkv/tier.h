// Where blocks live beside the pool: a disk, another machine. One small face, which every such store has.
//
// A tier is passive: it makes no threads and decides nothing. Who uses it says what to store and when to look, and
// verifies nothing, because a tier gives back only what it has proved to be what was stored.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "pagedkv/export.h"
#include "pagedkv/prefix.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

using Deadline = std::chrono::steady_clock::time_point;

// What became of one item. No call of a tier fails as a whole.
enum class TierOutcome : uint8_t {
  kDone,     // got and verified; or stored, or there already
  kMissing,  // not there
  kRefused,  // found, but not what was stored: a checksum, key, token or size differs. The entry is deleted
  kLate,     // the deadline came first
  kNoRoom,   // budget, full disk, or an image above the tier's largest
  kDown,     // I/O error, read-only, no connection: the tier rests for a while
  kOrphan,   // not stored: the block before it in its chain is not there, and without that it is of no use
};
inline constexpr int kTierOutcomes = int(TierOutcome::kOrphan) + 1;
PKV_API const char* tier_outcome_name(TierOutcome outcome);  // "done", "missing", ...

// All that an image must be proved against before a byte of it is used.
struct TierBlock {
  PrefixKey key{}, parent{};          // parent: the key before it, of the first block the root's
  PrefixKey descriptor{};             // Cache::descriptor() of the cache whose image it is
  uint32_t group = 0;                 // whose image of the block it is
  uint32_t depth = 0;                 // blocks before it in its chain
  std::span<const int32_t> tokens{};  // of the block, in full width
};

struct TierGet {
  TierBlock block{};
  std::span<std::byte> image{};  // filled when the outcome is kDone; otherwise its content is undefined
  TierOutcome outcome = TierOutcome::kMissing;
};

struct TierPut {
  TierBlock block{};
  std::span<const std::byte> image{};
  std::chrono::seconds keep{0};  // time to live, 0: until it makes room
  TierOutcome outcome = TierOutcome::kNoRoom;
};

struct TierTraits {
  std::string_view name;    // "disk"
  std::string_view medium;  // "DISK", as events call it
  Bytes max_image{0};
  bool shared = false;   // other machines write to it
  bool durable = false;  // what it holds is there after a restart
};

struct TierStats {
  int64_t bytes = 0, budget = 0;     // what the tier takes in all, and may take
  int64_t blocks = 0;                // images that are there
  int64_t image_bytes = 0;           // of them
  int64_t gets[kTierOutcomes] = {};  // by outcome
  int64_t puts[kTierOutcomes] = {};
  int64_t evicted = 0, expired = 0;
  int64_t bytes_read = 0, bytes_written = 0;
  double get_seconds = 0, put_seconds = 0;  // spent in those calls, of all threads
  bool down = false;
};

// Any thread, several at once, of the process that opened it: in a forked child every call finds it kDown.
class PKV_API Tier {
 public:
  virtual ~Tier() = default;
  virtual TierTraits traits() const = 0;
  // How many of these blocks, from the first on, are there: not verified yet. 0 when late or down.
  virtual int64_t leading(std::span<const PrefixKey> keys, uint32_t group, Deadline deadline) = 0;
  // In their order; stops at the first that is not kDone, and leaves those after it kMissing.
  virtual void get(std::span<TierGet> items, Deadline deadline) = 0;
  // In their order, a chain's beginning first. Images that are there already are kept.
  virtual void put(std::span<TierPut> items, Deadline deadline) = 0;
  // The chain that ends with this block was used: a hint, which never waits.
  virtual void touch(const PrefixKey& last) = 0;
  // Returns when no image of these keys can come back, even after a loss of the index. False: not done (down).
  virtual bool remove(std::span<const PrefixKey> keys, Deadline deadline) = 0;
  // What has to be done now and then: syncing, expiry. To be called about once a second.
  virtual void tick() = 0;
  virtual TierStats stats() const = 0;
};

}  // namespace pagedkv
