// What goes between the cache and its tier, beside the steps: blocks that got keys are written, and beginnings of
// prompts that the tier has are read back. A thread writes and two read; who runs the model waits for none of them.
//
// Blocks are held, not copied: one that waits to be written, or is being filled, is nobody else's until it is let
// go.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "engine/clock.h"
#include "engine/tier_figures.h"
#include "pagedkv/cache.h"
#include "pagedkv/tier.h"
#include "pagedkv/units.h"

namespace pagedkv::engine {

struct TierTrafficOptions {
  std::shared_ptr<Tier> tier;
  Tokens min_prefix{256};        // less is computed rather than read
  std::chrono::seconds keep{0};  // time to live of what is stored; 0: until it makes room
  std::chrono::milliseconds patience{
      2000};  // for one answer, read or write: a tier that hangs is waited for no longer
  // What the model's file holds, where that is known already. Else it is asked for once, on the thread that writes:
  // until that returns, which is to be soon once `stop` is set, nothing is looked up and what is to be stored
  // waits.
  std::optional<PrefixKey> identity = std::nullopt;
  std::function<Result<PrefixKey>(const std::atomic<bool>& stop)> identify;
};

// How many of a prompt's blocks the tier has: asked while the prompt waits.
struct TierLookup {
  std::vector<PrefixKey> keys;     // of the prompt's blocks, as the tier knows them
  Clock::time_point until;         // an answer is awaited
  std::atomic<int64_t> found{-1};  // leading blocks; < 0: not known yet
};

// A prompt's beginning on its way back.
struct TierRestore {
  Restore restore;
  std::vector<int32_t> prompt;
  PrefixMatch match;
  std::vector<PrefixKey> keys;  // TierLookup's
  PrefixKey root;               // the key above them, as the tier knows it
  Clock::time_point began;
  std::vector<uint8_t> filled;           // [restore.places]
  std::atomic<size_t> next{0};           // place that nobody reads yet
  std::atomic<int64_t> stopped_at{};     // places of blocks from this one on are not worth reading
  std::atomic<int> readers{0};           // that have not left it
  std::atomic<Clock::rep> last_read{0};  // when the last image came
};

class TierTraffic {
 public:
  // `cache` must outlive it.
  TierTraffic(Cache& cache, TierTrafficOptions options);
  // Writes what waits, for ten seconds or the patience at most; the rest is skipped, and that is told.
  ~TierTraffic();
  TierTraffic(const TierTraffic&) = delete;
  TierTraffic& operator=(const TierTraffic&) = delete;

  // --- the thread that runs the model -----------------------------------------------------------------------
  // After a step: what got a key waits to be written, what was written is let go.
  void collect();
  // Some blocks are held that the next collect() may let go.
  bool holds_blocks() const;
  // The pool is full: what waits to be written is let go; if nothing does, what is being written, once that is
  // done. False: nothing could be let go.
  bool give_way();
  // Null: the tier is closed, is late with an earlier answer, or cannot have what is worth asking for.
  std::shared_ptr<TierLookup> look_up(const PrefixMatch& match, std::span<const int32_t> prompt);
  // True: an answer may still come, soon.
  bool is_awaited(const std::shared_ptr<TierLookup>& lookup);
  // Starts to read back what the lookup found. Null, and counted: not worth it, or no room.
  std::shared_ptr<TierRestore> begin(const TierLookup& lookup, const PrefixMatch& match,
                                     std::span<const int32_t> prompt);
  static bool is_done(const TierRestore& restore) { return restore.readers.load() == 0; }
  // Nothing has come of it for too long.
  bool is_stuck(const TierRestore& restore) const;
  // What came back is cached from now on; how much of the prompt. Requires: is_done.
  Tokens end(TierRestore& restore);
  // Nobody waits for it any more, be it that its request has gone or that it is stuck.
  void abandon(std::shared_ptr<TierRestore> restore);
  // Until a lookup or a restore has gone on, or for so long.
  void wait(std::chrono::milliseconds at_most);
  // A step computed so many tokens: what reading is compared with.
  void computed(int64_t n_tokens, double seconds);

  TierFigures figures() const;  // any thread; the tier's own as of its last work, a second ago at most

 private:
  struct Buffer;  // of a thread that reads or writes

  void open(const PrefixKey& identity);
  void write();  // the thread that writes
  void write_some(std::vector<KeyedBlock>& batch, Buffer& buffer);
  void read();  // a thread that reads
  void help(TierRestore& restore, Buffer& buffer);
  void read_some(TierRestore& restore, size_t begin, size_t end, Buffer& buffer);
  PrefixKey stored_key(const PrefixKey& key) const;
  bool is_faster(int64_t bytes, int64_t tokens);
  void tell();
  void refresh_figures();

  Cache& cache_;
  const TierTrafficOptions options_;
  const int64_t most_waiting_;
  PrefixKey descriptor_{};  // of the cache and the model's content; set before open_
  PrefixKey identity_{};
  std::atomic<bool> open_{false}, stop_{false};

  // Of the thread that runs the model.
  std::vector<std::shared_ptr<TierRestore>> abandoned_;
  std::shared_ptr<TierLookup> late_;                // that was not answered in time
  double compute_tokens_s_ = 0, read_bytes_s_ = 0;  // as measured; 0: not yet
  bool reading_is_faster_ = true, told_stuck_ = false;
  Clock::time_point try_again_{};

  mutable std::mutex mutex_;  // of all below
  std::condition_variable to_write_, to_read_, news_;
  std::deque<KeyedBlock> waiting_;
  bool writing_ = false, never_opens_ = false;
  std::vector<KeyedBlock> written_;  // to be let go
  std::deque<std::function<void(Buffer&)>> read_tasks_;
  uint64_t n_news_ = 0, n_seen_ = 0;
  bool stop_writing_ = false, stop_reading_ = false;
  Clock::time_point last_write_{};  // once stop_writing_ is set: until then what waits is written
  TierFigures figures_;
  std::vector<std::thread> threads_;
};

}  // namespace pagedkv::engine
