// The disk tier: an index, chunks of slots, and the rules of who makes room. docs/formats.md has the folder.
#pragma once

#include <unistd.h>

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "pagedkv/disk_tier.h"
#include "store/disk/chunks.h"
#include "store/disk/directory.h"
#include "store/disk/files.h"
#include "store/disk/index.h"

namespace pagedkv {

class DiskTier final : public Tier {
 public:
  // `files` must outlive the tier.
  static Result<std::unique_ptr<Tier>> open(const DiskTierOptions& options, Files& files);

  ~DiskTier() override;
  TierTraits traits() const override;
  int64_t leading(std::span<const PrefixKey> keys, uint32_t group, Deadline deadline) override;
  void get(std::span<TierGet> items, Deadline deadline) override;
  void put(std::span<TierPut> items, Deadline deadline) override;
  void touch(const PrefixKey& last) override;
  bool remove(std::span<const PrefixKey> keys, Deadline deadline) override;
  void tick() override;
  TierStats stats() const override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  DiskTier(DiskTierOptions options, Directory directory, Files& files)
      : options_(std::move(options)),
        directory_(std::move(directory)),
        files_(files),
        chunks_(files, directory_.chunks_path()) {}

  Status open_all();
  Status open_index();
  Status rebuild_index();
  Status match_index_to_chunks();

  TierOutcome get_one(TierGet& item);
  TierOutcome put_one(const TierPut& item, Lock& lock);
  Result<bool> has_parent(const TierBlock& block);
  TierOutcome read_verified(const HeldSlot& slot, TierGet& item);
  void forget(const IndexRow& row, Lock& lock);
  std::optional<SlotPlace> room_for(int64_t slot_bytes, Lock& lock);
  // Whether the folder stays within its budget with these files and slots more.
  bool fits(int64_t more_bytes, int64_t more_slots) const;
  bool grow(int64_t slot_bytes);
  bool drop_coldest_chunk(int64_t before);
  bool evict_one(int64_t slot_bytes);
  bool change(const std::function<Status()>& changes);
  void flush_touches();

  // A forked child has the same files open, and would write over what its parent stores: for it the tier is down.
  bool is_ours() const { return getpid() == owner_; }
  // Whether the tier is left alone now. Mends a damaged index when the rest is over.
  bool rests();
  TierOutcome write_record(const HeldSlot& slot, const TierPut& item, int64_t expires);
  void fail(const Status& status);
  void works();
  void give_up();
  int64_t now_stamp();

  const pid_t owner_ = getpid();
  const DiskTierOptions options_;
  const Directory directory_;
  Files& files_;
  mutable std::mutex mutex_;  // of all below
  Chunks chunks_;
  std::unique_ptr<BlockIndex> index_;
  std::vector<PrefixKey> touched_;
  TierStats stats_;
  int64_t last_stamp_ = 0;
  Deadline look_for_chunks_{};  // not before: it reads the whole index
  Deadline down_until_{};
  std::chrono::seconds rest_{1};
  bool index_is_damaged_ = false;
  bool is_gone_ = false;  // the folder
  bool told_full_ = false, told_down_ = false, told_refused_ = false;
};

}  // namespace pagedkv
