#include "cache/cache_core.h"

#include <algorithm>
#include <ranges>

#include "base/check.h"
#include "base/text.h"

namespace pagedkv {

CacheCore::CacheCore(const Options& options, const std::vector<Group>& groups)
    : options_(options), index_(options.block_size, int(groups.size()), options.hash) {
  for (size_t g = 0; g < groups.size(); ++g) {
    PKV_CHECK(groups[g].source != nullptr);
    pools_.push_back(
        std::make_unique<BlockPool>(groups[g].pool, *groups[g].source,
                                    [this, g](uint32_t entry, BlockId) { index_.forget_block(entry, int(g)); }));
    windows_.push_back(groups[g].sliding_window);
  }
  outside_.resize(groups.size());
  const auto full = std::ranges::find(windows_, 0);
  main_group_ = full == windows_.end() ? 0 : int(full - windows_.begin());
}

Status CacheCore::open() {
  for (auto& pool : pools_)
    if (Status status = pool->open_floor(); !status.ok()) return status;
  return Status();
}

Result<CacheCore::Sequence*> CacheCore::find(SequenceId id) {
  const bool known = id.index < sequences_.size() && sequences_[id.index].generation == id.generation;
  if (!known || !sequences_[id.index].live || sequences_[id.index].released) {
    return Status(Code::kStale,
                  str("[cache] sequence ", id.index, " (generation ", id.generation, ") is not live"));
  }
  return &sequences_[id.index];
}

Result<const CacheCore::Sequence*> CacheCore::find(SequenceId id) const {
  auto found = const_cast<CacheCore*>(this)->find(id);
  if (!found.ok()) return found.status();
  return static_cast<const Sequence*>(*found);
}

SequenceId CacheCore::new_sequence() {
  uint32_t index;
  if (!free_sequences_.empty()) {
    index = free_sequences_.back();
    free_sequences_.pop_back();
  } else {
    index = uint32_t(sequences_.size());
    sequences_.emplace_back();
  }
  Sequence& s = sequences_[index];
  const uint32_t generation = s.generation;
  s = Sequence{};
  s.generation = generation;
  s.live = true;
  s.version = ++last_version_;
  s.tables.resize(pools_.size());
  return {index, generation};
}

// A query at position `length` sees keys from length - W + 1 on.
int64_t CacheCore::first_needed_block(int group, int64_t length) const {
  const int64_t window = windows_[size_t(group)];
  return window == 0 ? 0 : std::max<int64_t>(0, length - window + 1) / options_.block_size;
}

// One position more is kept, so that the last token can be taken back and computed again.
int64_t CacheCore::first_kept_block(int group, int64_t length) const {
  const int64_t window = windows_[size_t(group)];
  return window == 0 ? 0 : std::max<int64_t>(0, length - window) / options_.block_size;
}

std::vector<Key> CacheCore::hash_prompt(std::span<const int32_t> prompt, std::string_view name_space,
                                        std::vector<Key> known) const {
  const size_t block_size = size_t(options_.block_size), n_blocks = prompt.size() / block_size;
  std::vector<Key> keys = std::move(known);
  keys.resize(std::min(keys.size(), n_blocks));
  keys.reserve(n_blocks);
  Key parent = keys.empty() ? root_key(options_.descriptor, name_space) : keys.back();
  for (size_t at = keys.size() * block_size; at + block_size <= prompt.size(); at += block_size)
    keys.push_back(parent = index_.hash(parent, prompt.subspan(at, block_size)));
  return keys;
}

CacheCore::Match CacheCore::match(std::span<const int32_t> prompt, std::span<const Key> keys, uint32_t root) const {
  const int64_t block_size = options_.block_size;
  // The last token is always computed, so a hit never covers it.
  const int64_t n_max = std::min(int64_t(keys.size()), (int64_t(prompt.size()) - 1) / block_size);
  Match match{{}, PrefixReason::kHit};
  match.entries.reserve(size_t(std::max<int64_t>(0, n_max)));
  for (int64_t i = 0; i < n_max; ++i) {
    const Key& key = keys[size_t(i)];
    const uint32_t parent = match.entries.empty() ? root : match.entries.back();
    const auto found = index_.find(parent, key, prompt.subspan(size_t(i * block_size), size_t(block_size)));
    if (found.entry == PrefixIndex::kNone) {
      match.reason = found.collision           ? PrefixReason::kCollision
                     : index_.was_evicted(key) ? PrefixReason::kEvicted
                                               : PrefixReason::kNew;
      break;
    }
    bool whole = true;
    for (int g = 0; g < n_groups(); ++g)
      whole &= windows_[size_t(g)] != 0 || index_.block(found.entry, g) != kNoBlock;
    if (!whole) {
      match.reason = PrefixReason::kEvicted;
      break;
    }
    match.entries.push_back(found.entry);
  }
  const int64_t n = window_limit(match.entries, int64_t(match.entries.size()));
  if (n < int64_t(match.entries.size())) {
    match.entries.resize(size_t(n));
    match.reason = PrefixReason::kWindowGone;
  }
  return match;
}

void CacheCore::look_up(std::span<const int32_t> prompt, PrefixMatch& found) const {
  found.entries.clear();
  const uint32_t root = index_.find_root(found.name_space);
  if (root != PrefixIndex::kNone && options_.prefix_sharing)
    found.entries = match(prompt, found.keys, root).entries;
  found.cached = Tokens(int64_t(found.entries.size()) * options_.block_size);
}

int64_t CacheCore::idle_blocks(const PrefixMatch& match) const {
  const BlockPool& pool = *pools_[size_t(main_group_)];
  return std::ranges::count_if(match.entries, [&](uint32_t entry) {
    const BlockId block = entry < index_.end_entry() ? index_.block(entry, main_group_) : kNoBlock;
    return block != kNoBlock && pool.holders(block) == 0;
  });
}

// The longest prefix of at most n entries whose window groups still hold what the next query sees, and what the
// last token sees if it is taken back.
int64_t CacheCore::window_limit(std::span<const uint32_t> entries, int64_t n) const {
  for (int g = 0; g < n_groups();) {
    int64_t missing = -1;
    const int64_t first = first_kept_block(g, n * options_.block_size);
    for (int64_t i = n - 1; i >= first && missing < 0; --i)
      if (index_.block(entries[size_t(i)], g) == kNoBlock) missing = i;
    if (missing < 0) {
      ++g;
    } else {
      n = missing;  // any longer prefix needs this block, too
      g = 0;
    }
  }
  return n;
}

Result<Started> CacheCore::start(std::span<const int32_t> prompt, std::string_view name_space,
                                 std::span<const Key> keys, const StartOptions& options, Orders& orders) {
  if (Status status = check_length(0, int64_t(prompt.size())); !status.ok()) return status;
  const SequenceId id = new_sequence();
  Sequence& s = sequences_[id.index];
  const bool reuse = options.reuse && options_.prefix_sharing;
  s.store = options.store && options_.prefix_sharing;
  if (s.store || reuse) {
    s.node = index_.root(name_space, options_.descriptor);
    index_.pin(s.node);
  }
  const int64_t block_size = options_.block_size, size = int64_t(prompt.size());
  PrefixReason reason = PrefixReason::kOff;
  int64_t reused = 0;
  if (reuse && size > 0) {
    const Match found = match(prompt, keys, s.node);
    reason = found.reason;
    take_over(s, found.entries);
    reused = s.node_blocks * block_size;
    copy_partial(s, prompt.subspan(size_t(reused), size_t(std::min(block_size, size - 1 - reused))), orders, reason,
                 reused);
    if (reused == size - 1) reason = PrefixReason::kLastToken;
    if (reason == PrefixReason::kHit) reason = PrefixReason::kNew;  // the blocks hit; what follows them is unknown
  }
  s.tokens.assign(prompt.begin(), prompt.begin() + reused);
  s.length = reused;
  if (s.store && int64_t(keys.size()) > s.node_blocks) {
    s.prompt.assign(prompt.begin(), prompt.end());
    s.prompt_keys.assign(keys.begin(),
                         keys.begin() + std::min(std::ssize(keys), std::ptrdiff_t(size / block_size)));
  }
  if (options.counted) {
    figures_.tokens_by_reason[size_t(PrefixReason::kHit)] += reused;
    figures_.tokens_by_reason[size_t(reason)] += size - reused;
  }
  return Started{id, Tokens(reused), reason};
}

// The sequence stands on the last of these entries, and holds their blocks.
void CacheCore::take_over(Sequence& s, std::span<const uint32_t> entries) {
  const int64_t n = int64_t(entries.size());
  for (int g = 0; g < n_groups(); ++g) {
    Table& table = s.tables[size_t(g)];
    table.first_held = first_kept_block(g, n * options_.block_size);
    for (int64_t i = 0; i < n; ++i) {
      const BlockId block = i < table.first_held ? kNoBlock : index_.block(entries[size_t(i)], g);
      if (block != kNoBlock) pools_[size_t(g)]->hold(block);
      table.ids.push_back(block);
    }
  }
  if (n == 0) return;
  index_.pin(entries.back());
  index_.unpin(s.node);
  s.node = entries.back();
  s.node_blocks = n;
}

// Orders a copy of the block that shares most leading tokens with `rest`. Its source is held only while a block is
// found for the copy: the order is carried out before anybody else takes the source.
void CacheCore::copy_partial(Sequence& s, std::span<const int32_t> rest, Orders& orders, PrefixReason& reason,
                             int64_t& reused) {
  if (rest.empty()) return;
  const auto best = index_.best_partial(s.node, rest);
  if (best.n_tokens == 0) return;
  std::vector<BlockId> sources;
  for (int g = 0; g < n_groups(); ++g) {
    sources.push_back(index_.block(best.entry, g));
    pools_[size_t(g)]->hold(sources.back());
  }
  bool room = true;
  for (int g = 0; g < n_groups() && room; ++g) room = pools_[size_t(g)]->ensure_free(1);
  for (int g = 0; g < n_groups(); ++g) {
    BlockPool& pool = *pools_[size_t(g)];
    if (room) {
      const BlockId block = pool.take();
      orders.copies.push_back({g, sources[size_t(g)], block});
      s.tables[size_t(g)].ids.push_back(block);
    }
    pool.drop(sources[size_t(g)]);
  }
  if (!room) {
    reason = PrefixReason::kNoRoom;
    return;
  }
  ++figures_.copies;
  reused += best.n_tokens;
}

Result<SequenceId> CacheCore::fork(SequenceId id) {
  auto found = find(id);
  if (!found.ok()) return found.status();
  if ((*found)->step != 0) return invalid_argument("[fork] the sequence is in the middle of a step");
  const SequenceId child_id = new_sequence();  // may move sequences_
  const Sequence& parent = sequences_[id.index];
  Sequence& child = sequences_[child_id.index];
  child.store = parent.store;
  child.length = parent.length;
  child.tokens = parent.tokens;
  child.node = parent.node;
  child.node_blocks = parent.node_blocks;
  child.prompt = parent.prompt;
  child.prompt_keys = parent.prompt_keys;
  child.tables = parent.tables;
  if (child.node != PrefixIndex::kNone) index_.pin(child.node);
  for (int g = 0; g < n_groups(); ++g)
    for (BlockId block : child.tables[size_t(g)].ids)
      if (block != kNoBlock) pools_[size_t(g)]->hold(block);
  return child_id;
}

Status CacheCore::truncate(SequenceId id, int64_t new_length) {
  auto found = find(id);
  if (!found.ok()) return found.status();
  Sequence& s = **found;
  if (s.step != 0) return invalid_argument("[truncate] the sequence is in the middle of a step");
  if (new_length < 0 || new_length > s.length)
    return invalid_argument(str("[truncate] length ", new_length, " is asked, the sequence has ", s.length));
  const int64_t n_blocks = blocks_for(Tokens(new_length), Tokens(options_.block_size)).n;
  for (int g = 0; g < n_groups(); ++g) {
    // Also a block that only later tokens are written to: with a window of 1 no key before them is needed.
    const int64_t needed_from = first_needed_block(g, new_length), held_from = s.tables[size_t(g)].first_held;
    if (needed_from < n_blocks && needed_from < held_from) {
      return invalid_argument(str("[truncate] length ", new_length, " needs the block of positions ",
                                  needed_from * options_.block_size, " to ",
                                  (needed_from + 1) * options_.block_size - 1, ", the window of ",
                                  windows_[size_t(g)], " holds them from ", held_from * options_.block_size));
    }
  }
  if (new_length == s.length) return Status();
  s.version = ++last_version_;
  drop_open_entry(s);
  s.length = new_length;
  s.tokens.resize(std::min(s.tokens.size(), size_t(new_length)));
  while (s.node_blocks > new_length / options_.block_size) {
    const uint32_t parent = index_.parent(s.node);
    index_.pin(parent);
    index_.unpin(s.node);
    s.node = parent;
    --s.node_blocks;
  }
  drop_tail(s, n_blocks);
  for (Table& table : s.tables) table.first_held = std::min(table.first_held, n_blocks);
  sync_open_entry(s);
  return Status();
}

Status CacheCore::release(SequenceId id) {
  auto found = find(id);
  if (!found.ok()) return found.status();
  // Kernels of an open step may still read and write its blocks: they go when the step ends.
  if ((*found)->step != 0)
    (*found)->released = true;
  else
    end_sequence(id.index);
  return Status();
}

void CacheCore::end_sequence(uint32_t index) {
  Sequence& s = sequences_[index];
  keep_tail_as_partial(s);
  drop_open_entry(s);
  drop_tail(s, 0);
  if (s.node != PrefixIndex::kNone) index_.unpin(s.node);
  s.node = PrefixIndex::kNone;
  s.live = false;
  ++s.generation;
  free_sequences_.push_back(index);
}

// Tail blocks go first: a prefix is useless without its beginning, so the end is the cheapest loss.
void CacheCore::drop_tail(Sequence& s, int64_t keep_blocks) {
  for (int g = 0; g < n_groups(); ++g) {
    auto& ids = s.tables[size_t(g)].ids;
    while (int64_t(ids.size()) > keep_blocks) {
      if (ids.back() != kNoBlock) pools_[size_t(g)]->drop(ids.back());
      ids.pop_back();
    }
  }
}

Result<int64_t> CacheCore::length(SequenceId id) const {
  auto found = find(id);
  if (!found.ok()) return found.status();
  return (*found)->length;
}

Result<std::span<const BlockId>> CacheCore::table(SequenceId id, int group) const {
  auto found = find(id);
  if (!found.ok()) return found.status();
  if (group < 0 || group >= n_groups())
    return invalid_argument(str("[cache] group is ", group, " of ", n_groups()));
  return std::span<const BlockId>((*found)->tables[size_t(group)].ids);
}

Result<int64_t> CacheCore::blocks_held(SequenceId id, int group) const {
  auto ids = table(id, group);
  if (!ids.ok()) return ids.status();
  return int64_t(ids->size()) - std::ranges::count(*ids, kNoBlock);
}

void CacheCore::clear_cached() {
  for (auto& pool : pools_) pool->evict_all_cached();
}

Status CacheCore::raise_floor(int64_t blocks) { return pools_[size_t(main_group_)]->raise_floor(blocks); }
Status CacheCore::keep_committed(int group) {
  BlockPool& pool = *pools_[size_t(group)];
  return pool.raise_floor(pool.end_id());
}

CacheCore::Figures CacheCore::figures() const {
  Figures figures = figures_;
  for (const Sequence& s : sequences_) {
    figures.sequences += s.live;
    figures.tokens += s.live ? s.length : 0;
  }
  return figures;
}

std::vector<BlockView> CacheCore::block_views(int group) const {
  std::vector<BlockView> views = pools_[size_t(group)]->views();
  for (size_t id = 0; id < views.size(); ++id) {
    const uint32_t entry = pools_[size_t(group)]->entry(BlockId(id));
    if (entry == kNoEntry) continue;
    for (int byte = 0; byte < 8; ++byte) views[id].key = views[id].key << 8 | index_.key(entry).bytes[size_t(byte)];
  }
  for (size_t s = 0; s < sequences_.size(); ++s) {
    if (!sequences_[s].live) continue;
    for (const BlockId block : sequences_[s].tables[size_t(group)].ids)
      if (block != kNoBlock) views[size_t(block)].sequence = int64_t(s);
  }
  return views;
}

}  // namespace pagedkv
