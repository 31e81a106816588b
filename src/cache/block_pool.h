// The blocks of one group: who holds them, which are free, which are cached, and how the pool grows and shrinks.
//
// A block's state follows from its holders and its entry (the place of its key in the prefix index):
//   free (0, none) -> open (1, none) -> full (1, keyed) -> shared (2+) -> cached (0, keyed, on the LRU) -> free
// Taking and giving are O(1). One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cache/block_source.h"
#include "pagedkv/block_view.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

inline constexpr uint32_t kNoEntry = 0xffffffffu;

class BlockPool {
 public:
  struct Options {
    int64_t max_blocks = 0;     // at most kMaxBlocks
    int64_t floor_blocks = 0;   // committed from the start, never given back
    int64_t extent_blocks = 1;  // blocks that are committed together
    int64_t image_bytes = 0;    // for the rule of when an empty extent goes back
    int64_t extent_bytes = 0;
    std::string limit;  // what sets max_blocks, for messages
  };
  struct Counts {
    int64_t total = 0, free = 0, open = 0, full = 0, shared = 0, cached = 0, quarantined = 0;
  };
  struct Events {
    int64_t alloc = 0, growth = 0, shrink = 0, eviction = 0;
  };

  // `source` must outlive the pool. `on_evict(entry, block)` tells the index that the block's key is gone.
  BlockPool(const Options& options, BlockSource& source, std::function<void(uint32_t, BlockId)> on_evict);

  // Commits the floor. Errors: those of the source.
  Status open_floor();
  // Commits extents until `blocks` exist, and keeps them. Errors: kCapacity; nothing changed.
  Status raise_floor(int64_t blocks);

  // Makes sure that `n` blocks are free, first by growing, then by evicting cached ones, least recently used first.
  // False if there are not so many.
  bool ensure_free(int64_t n);
  // Grows until n blocks are free or cached. False if memory ends first; last_refusal() says why.
  bool ensure_takable(int64_t n);
  const Status& last_refusal() const { return last_refusal_; }
  // Gives empty extents back as far as the rule asks: committed <= in use + one extent.
  void shrink();

  BlockId take();  // Requires: a free block. One holder, no key.
  void hold(BlockId block);
  void drop(BlockId block);
  // The block's key went into the index at `entry`; nobody writes it any more. Requires: no entry yet.
  void set_entry(BlockId block, uint32_t entry);
  void evict_all_cached();

  uint32_t holders(BlockId block) const { return blocks_[index(block)].holders; }
  uint32_t entry(BlockId block) const { return blocks_[index(block)].entry; }
  // A writer must copy first: somebody else holds the block, or its key promises its content.
  bool is_writable(BlockId block) const { return holders(block) == 1 && entry(block) == kNoEntry; }

  // The time that blocks are stamped with when they are taken, held or dropped.
  void set_step(int64_t step) { step_ = step; }
  // State, holders and stamp of each block by id.
  std::vector<BlockView> views() const;

  const Counts& counts() const { return counts_; }
  const Events& events() const { return events_; }
  const Options& options() const { return options_; }
  int64_t takable() const;                                    // free + cached + what could still be committed
  int64_t end_id() const { return int64_t(blocks_.size()); }  // ids below it have been committed at some time

  // Calls `problem(text)` for each broken invariant, given how often tables hold each block.
  void verify(const std::vector<uint32_t>& expected_holders,
              const std::function<void(const char*, int64_t)>& problem) const;

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  enum class Place : uint8_t { kUncommitted, kFree, kHeld, kCached, kQuarantined };

  struct Block {
    uint32_t holders = 0;
    uint32_t entry = kNoEntry;
    uint32_t prev = kNone, next = kNone;  // neighbours on the LRU, or next in the extent's free list
    int64_t last_step = 0;
    Place place = Place::kUncommitted;
  };
  struct Extent {
    bool committed = false;
    uint32_t free_head = kNone;
    uint32_t n_free = 0;
    uint32_t size = 0;
    uint32_t prev = kNone, next = kNone;  // extents with free blocks
    bool listed = false;
    bool spare = false;  // on spares_
  };

  static size_t index(BlockId block) { return size_t(block); }
  size_t extent_of(uint32_t block) const { return block / size_t(options_.extent_blocks); }
  Status grow_one();
  void give(uint32_t block);
  void push_free(uint32_t block);
  void list_extent(uint32_t extent);
  void unlist_extent(uint32_t extent);
  bool is_empty(uint32_t extent) const;
  bool holds_too_much() const;
  void give_back_spares();
  void give_back(uint32_t extent);
  void lru_push(uint32_t block);
  void lru_remove(uint32_t block);
  void count(const Block& block, int64_t sign);
  void evict_one();

  Options options_;
  BlockSource& source_;
  std::function<void(uint32_t, BlockId)> on_evict_;
  std::vector<Block> blocks_;
  std::vector<Extent> extents_;
  std::vector<uint32_t> holes_;  // extents below the end that were given back; a min-heap
  uint32_t partial_head_ = kNone;
  uint32_t lru_head_ = kNone, lru_tail_ = kNone;
  std::vector<uint32_t> spares_;  // extents that were all free when last looked at
  int64_t floor_extents_ = 0;
  int64_t step_ = 0;
  Counts counts_;
  Events events_;
  Status last_refusal_;
};

}  // namespace pagedkv
