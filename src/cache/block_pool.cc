#include "cache/block_pool.h"

#include <algorithm>

#include "base/check.h"
#include "pagedkv/log.h"

namespace pagedkv {

BlockPool::BlockPool(const Options& options, BlockSource& source, std::function<void(uint32_t, BlockId)> on_evict)
    : options_(options), source_(source), on_evict_(std::move(on_evict)) {}

Status BlockPool::open_floor() {
  Status status = raise_floor(options_.floor_blocks);
  events_.growth = 0;  // what is there from the start is no growth
  return status;
}

Status BlockPool::raise_floor(int64_t blocks) {
  if (blocks > options_.max_blocks) return Status(Code::kCapacity, options_.limit);
  while (counts_.total < blocks) {
    if (Status status = grow_one(); !status.ok()) {
      shrink();
      return status;
    }
  }
  const int64_t extents = (blocks + options_.extent_blocks - 1) / options_.extent_blocks;
  floor_extents_ = std::max(floor_extents_, extents);
  return Status();
}

int64_t BlockPool::takable() const {
  const int64_t left =
      std::min(options_.max_blocks - counts_.total - counts_.quarantined, source_.blocks_left_by_budget());
  return counts_.free + counts_.cached + std::max<int64_t>(0, left);
}

bool BlockPool::ensure_takable(int64_t n) {
  while (counts_.free + counts_.cached < n) {
    last_refusal_ = grow_one();
    if (!last_refusal_.ok()) return false;
  }
  return true;
}

bool BlockPool::ensure_free(int64_t n) {
  // Growing comes first: a cached block may save somebody a prefill. A refusal is no failure while blocks are
  // cached.
  while (counts_.free < n && counts_.total < options_.max_blocks && grow_one().ok()) continue;
  while (counts_.free < n && counts_.cached > 0) evict_one();
  return counts_.free >= n;
}

Status BlockPool::grow_one() {
  const int64_t size = options_.extent_blocks;
  uint32_t extent;
  if (!holes_.empty()) {
    extent = holes_.front();
  } else {
    if (end_id() >= options_.max_blocks) return Status(Code::kCapacity, options_.limit);
    extent = uint32_t(extents_.size());
  }
  if (Status status = source_.commit(extent); !status.ok()) return status;
  if (!holes_.empty()) {
    std::pop_heap(holes_.begin(), holes_.end(), std::greater<>());
    holes_.pop_back();
  } else {
    extents_.emplace_back();
    blocks_.resize(size_t(std::min(int64_t(extents_.size()) * size, options_.max_blocks)));
  }
  Extent& fresh = extents_[extent];
  const uint32_t first = extent * uint32_t(size);
  fresh.committed = true;
  fresh.size = uint32_t(std::min<int64_t>(size, options_.max_blocks - first));
  for (uint32_t i = fresh.size; i-- > 0;) push_free(first + i);  // ascending ids from the list's head
  counts_.total += fresh.size;
  counts_.free += fresh.size;
  ++events_.growth;
  return Status();
}

void BlockPool::push_free(uint32_t block) {
  Block& b = blocks_[block];
  const uint32_t extent = uint32_t(extent_of(block));
  b.place = Place::kFree;
  b.prev = kNone;
  b.next = extents_[extent].free_head;
  extents_[extent].free_head = block;
  ++extents_[extent].n_free;
  if (!extents_[extent].listed) list_extent(extent);
}

void BlockPool::list_extent(uint32_t extent) {
  Extent& e = extents_[extent];
  e.listed = true;
  e.prev = kNone;
  e.next = partial_head_;
  if (partial_head_ != kNone) extents_[partial_head_].prev = extent;
  partial_head_ = extent;
}

void BlockPool::unlist_extent(uint32_t extent) {
  Extent& e = extents_[extent];
  if (e.prev != kNone) extents_[e.prev].next = e.next;
  if (e.next != kNone) extents_[e.next].prev = e.prev;
  if (partial_head_ == extent) partial_head_ = e.next;
  e.listed = false;
}

void BlockPool::count(const Block& block, int64_t sign) {
  if (block.holders > 1)
    counts_.shared += sign;
  else if (block.holders == 1)
    (block.entry == kNoEntry ? counts_.open : counts_.full) += sign;
  else
    (block.entry == kNoEntry ? counts_.free : counts_.cached) += sign;
}

BlockId BlockPool::take() {
  PKV_CHECK(partial_head_ != kNone);
  const uint32_t extent = partial_head_;
  Extent& e = extents_[extent];
  const uint32_t id = e.free_head;
  Block& block = blocks_[id];
  e.free_head = block.next;
  if (--e.n_free == 0) unlist_extent(extent);
  block.next = kNone;
  block.place = Place::kHeld;
  count(block, -1);
  block.holders = 1;
  block.last_step = step_;
  count(block, +1);
  ++events_.alloc;
  return BlockId(id);
}

void BlockPool::hold(BlockId id) {
  Block& block = blocks_[index(id)];
  if (block.holders == 0) {
    lru_remove(uint32_t(id));
    block.place = Place::kHeld;
  }
  block.last_step = step_;
  count(block, -1);
  ++block.holders;
  count(block, +1);
}

void BlockPool::drop(BlockId id) {
  Block& block = blocks_[index(id)];
  if (block.holders == 0) {  // our bug; a block given twice would reach two owners, so it is taken out of use
    notice("[pool] a block was dropped more often than held; it is quarantined");
    if (block.place == Place::kQuarantined) return;
    if (block.place == Place::kCached) {
      lru_remove(uint32_t(id));
      on_evict_(block.entry, id);
      count(block, -1);
      block.entry = kNoEntry;
      block.place = Place::kQuarantined;
      --counts_.total;
      ++counts_.quarantined;
    }
    return;
  }
  block.last_step = step_;
  count(block, -1);
  --block.holders;
  count(block, +1);
  if (block.holders > 0) return;
  if (block.entry != kNoEntry)
    lru_push(uint32_t(id));
  else
    give(uint32_t(id));
}

// A block without holder and key returns to its extent; an extent that is all free may go back to the system.
void BlockPool::give(uint32_t id) {
  push_free(id);
  const uint32_t extent = uint32_t(extent_of(id));
  if (is_empty(extent) && !extents_[extent].spare) {
    extents_[extent].spare = true;
    spares_.push_back(extent);
  }
  give_back_spares();
}

bool BlockPool::is_empty(uint32_t extent) const {
  const Extent& e = extents_[extent];
  return e.committed && e.n_free == e.size && extent >= floor_extents_;
}

// The rule of growth: committed <= in use + one extent.
bool BlockPool::holds_too_much() const {
  const int64_t in_use = (counts_.total - counts_.free) * options_.image_bytes;
  return source_.bytes_committed() > in_use + options_.extent_bytes;
}

void BlockPool::give_back_spares() {
  while (!spares_.empty() && holds_too_much()) {
    const uint32_t extent = spares_.back();
    spares_.pop_back();
    extents_[extent].spare = false;
    if (is_empty(extent)) give_back(extent);
  }
}

void BlockPool::give_back(uint32_t extent) {
  Extent& e = extents_[extent];
  unlist_extent(extent);
  const uint32_t first = extent * uint32_t(options_.extent_blocks);
  for (uint32_t i = 0; i < e.size; ++i) blocks_[first + i] = Block{};
  counts_.total -= e.size;
  counts_.free -= e.size;
  const bool spare = e.spare;  // it stays on the list, and is looked at when its turn comes
  e = Extent{};
  e.spare = spare;
  holes_.push_back(extent);
  std::push_heap(holes_.begin(), holes_.end(), std::greater<>());
  source_.decommit(extent);
  ++events_.shrink;
}

void BlockPool::shrink() {
  for (uint32_t extent = partial_head_; extent != kNone;) {
    const uint32_t next = extents_[extent].next;
    if (is_empty(extent) && holds_too_much()) give_back(extent);
    extent = next;
  }
}

void BlockPool::set_entry(BlockId id, uint32_t entry) {
  Block& block = blocks_[index(id)];
  PKV_CHECK(block.entry == kNoEntry && block.holders > 0);
  count(block, -1);
  block.entry = entry;
  count(block, +1);
}

void BlockPool::evict_one() {
  const uint32_t id = lru_head_;
  ++events_.eviction;
  on_evict_(blocks_[id].entry, BlockId(id));
  // Not given back to the system here: whoever evicts wants the block.
  Block& block = blocks_[id];
  lru_remove(id);
  count(block, -1);
  block.entry = kNoEntry;
  count(block, +1);
  push_free(id);
}

std::vector<BlockView> BlockPool::views() const {
  std::vector<BlockView> views(blocks_.size());
  for (size_t id = 0; id < blocks_.size(); ++id) {
    const Block& block = blocks_[id];
    BlockView& view = views[id];
    view.holders = block.holders;
    view.last_step = block.last_step;
    if (block.place == Place::kFree) view.state = BlockState::kFree;
    if (block.place == Place::kCached) view.state = BlockState::kCached;
    if (block.place != Place::kHeld) continue;
    view.state = block.holders > 1         ? BlockState::kShared
                 : block.entry == kNoEntry ? BlockState::kOpen
                                           : BlockState::kFull;
  }
  return views;
}

void BlockPool::evict_all_cached() {
  while (lru_head_ != kNone) evict_one();
  shrink();
}

void BlockPool::lru_push(uint32_t id) {
  Block& block = blocks_[id];
  block.place = Place::kCached;
  block.prev = lru_tail_;
  block.next = kNone;
  if (lru_tail_ != kNone) blocks_[lru_tail_].next = id;
  lru_tail_ = id;
  if (lru_head_ == kNone) lru_head_ = id;
}

void BlockPool::lru_remove(uint32_t id) {
  Block& block = blocks_[id];
  if (block.prev != kNone) blocks_[block.prev].next = block.next;
  if (block.next != kNone) blocks_[block.next].prev = block.prev;
  if (lru_head_ == id) lru_head_ = block.next;
  if (lru_tail_ == id) lru_tail_ = block.prev;
  block.prev = block.next = kNone;
}

void BlockPool::verify(const std::vector<uint32_t>& expected_holders,
                       const std::function<void(const char*, int64_t)>& problem) const {
  Counts seen;
  for (size_t id = 0; id < blocks_.size(); ++id) {
    const Block& block = blocks_[id];
    if (block.place == Place::kUncommitted || block.place == Place::kQuarantined) {
      if (expected_holders[id] != 0) problem("a table holds a block that has no memory", int64_t(id));
      seen.quarantined += block.place == Place::kQuarantined;
      continue;
    }
    ++seen.total;
    if (block.holders != expected_holders[id]) problem("holders differ from what the tables hold", int64_t(id));
    if (block.holders > 1) ++seen.shared;
    if (block.holders == 1) ++(block.entry == kNoEntry ? seen.open : seen.full);
    if (block.holders == 0) ++(block.entry == kNoEntry ? seen.free : seen.cached);
    const Place expected = block.holders > 0         ? Place::kHeld
                           : block.entry != kNoEntry ? Place::kCached
                                                     : Place::kFree;
    if (block.place != expected) problem("a block is not where its holders and key put it", int64_t(id));
  }
  int64_t free_listed = 0;
  for (uint32_t extent = partial_head_; extent != kNone; extent = extents_[extent].next) {
    uint32_t length = 0;
    for (uint32_t id = extents_[extent].free_head; id != kNone; id = blocks_[id].next, ++length) {
      if (blocks_[id].place != Place::kFree) problem("a block in the free list is not free", int64_t(id));
      if (length > extents_[extent].n_free) return problem("a free list is longer than its count", int64_t(extent));
    }
    if (length != extents_[extent].n_free) problem("a free list's length differs from its count", int64_t(extent));
    free_listed += length;
  }
  int64_t cached_listed = 0;
  for (uint32_t id = lru_head_; id != kNone; id = blocks_[id].next) {
    if (blocks_[id].place != Place::kCached) problem("a block on the LRU is not cached", int64_t(id));
    if (++cached_listed > seen.cached) return problem("the LRU is longer than its count", int64_t(id));
  }
  if (free_listed != seen.free) problem("free blocks are missing from the free lists", seen.free - free_listed);
  if (cached_listed != seen.cached) problem("cached blocks are missing from the LRU", seen.cached - cached_listed);
  if (seen.total != counts_.total || seen.free != counts_.free || seen.open != counts_.open ||
      seen.full != counts_.full || seen.shared != counts_.shared || seen.cached != counts_.cached) {
    problem("the counters differ from the blocks", seen.total);
  }
}

}  // namespace pagedkv
