// What tiers ask of the cache core: which blocks got keys, and blocks for images that come back.

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/text.h"
#include "cache/cache_core.h"

namespace pagedkv {

void CacheCore::hold_outside(int group, BlockId block) {
  pools_[size_t(group)]->hold(block);
  ++outside_[size_t(group)][block];
}

void CacheCore::drop_outside(int group, BlockId block) {
  auto& holds = outside_[size_t(group)];
  const auto found = holds.find(block);
  PKV_CHECK(found != holds.end());
  if (--found->second == 0) holds.erase(found);
  pools_[size_t(group)]->drop(block);
}

void CacheCore::list_keyed(int group, BlockId block, uint32_t entry, int64_t depth) {
  if (options_.most_keyed == 0) return;
  if (std::ssize(keyed_) >= options_.most_keyed) {
    ++figures_.keyed_passed_over;
    return;
  }
  hold_outside(group, block);
  const auto tokens = index_.tokens(entry);
  keyed_.push_back({.group = group,
                    .block = block,
                    .depth = uint32_t(depth),
                    .key = index_.key(entry),
                    .parent = index_.key(index_.parent(entry)),
                    .tokens = {tokens.begin(), tokens.end()}});
}

std::vector<KeyedBlock> CacheCore::take_keyed() { return std::exchange(keyed_, {}); }

Status CacheCore::let_go(int group, BlockId block) {
  if (group < 0 || group >= n_groups() || !outside_[size_t(group)].contains(block))
    return invalid_argument(str("[cache] block ", int64_t(block), " of group ", group, " is not held"));
  drop_outside(group, block);
  return Status();
}

Result<Restore> CacheCore::begin_restore(std::span<const int32_t> prompt, const PrefixMatch& match, int64_t n) {
  const size_t block_size = size_t(options_.block_size);
  if (n < 0 || n > std::ssize(match.keys) || n > std::ssize(prompt) / options_.block_size)
    return invalid_argument(str("[restore] ", n, " blocks of a prompt with ", match.keys.size(), " keys"));
  // A hit never covers the last token, and the windows that are wanted are those at the hit's end.
  n = std::min(n, (std::ssize(prompt) - 1) / options_.block_size);
  Restore restore;
  std::vector<int64_t> need(pools_.size());
  uint32_t entry = options_.prefix_sharing ? index_.find_root(match.name_space) : PrefixIndex::kNone;
  for (int64_t i = 0; i < n; ++i) {
    if (entry != PrefixIndex::kNone)
      entry = index_.find(entry, match.keys[size_t(i)], prompt.subspan(size_t(i) * block_size, block_size)).entry;
    for (int g = 0; g < n_groups(); ++g) {
      if (i < first_kept_block(g, n * options_.block_size)) continue;
      const BlockId block = entry == PrefixIndex::kNone ? kNoBlock : index_.block(entry, g);
      (block == kNoBlock ? restore.places : restore.kept).push_back({g, block, i});
      need[size_t(g)] += block == kNoBlock;
    }
  }
  for (const Restore::Place& place : restore.kept) hold_outside(place.group, place.block);
  if (const auto none = free_blocks(need)) {
    for (const Restore::Place& place : restore.kept) drop_outside(place.group, place.block);
    return Status(none->refusal.code(), str("[restore] need ", need[size_t(none->group)], " blocks in group ",
                                            none->group, "; ", none->refusal.message()));
  }
  for (Restore::Place& place : restore.places) {
    place.block = pools_[size_t(place.group)]->take();
    outside_[size_t(place.group)][place.block] = 1;
  }
  return restore;
}

int64_t CacheCore::end_restore(const Restore& restore, std::span<const int32_t> prompt, const PrefixMatch& match,
                               const std::vector<bool>& filled) {
  const int64_t block_size = options_.block_size;
  const uint32_t root = index_.root(match.name_space, options_.descriptor);
  index_.pin(root);
  uint32_t parent = root;
  size_t at = 0;  // places are in the order of the prompt
  const int64_t end = restore.places.empty() ? 0 : restore.places.back().index + 1;
  for (int64_t i = 0; i < end; ++i) {
    const auto tokens = prompt.subspan(size_t(i * block_size), size_t(block_size));
    const Key& key = match.keys[size_t(i)];
    uint32_t entry = index_.find(parent, key, tokens).entry;
    bool whole = true;
    const size_t first = at;
    for (; at < restore.places.size() && restore.places[at].index == i; ++at) {
      whole &= filled[at] || windows_[size_t(restore.places[at].group)] != 0;
    }
    if (!whole) break;
    if (entry == PrefixIndex::kNone) entry = index_.add(parent, key, tokens, PrefixIndex::Kind::kFull);
    for (size_t place = first; place < at; ++place) {
      const auto& [group, block, index] = restore.places[place];
      // The same block may have been computed meanwhile.
      if (!filled[place] || index_.block(entry, group) != kNoBlock) continue;
      give_key(entry, group, block);
    }
    parent = entry;
  }
  // Behind a window entries have no blocks, and stand for what comes after them: if nothing does, they go.
  index_.remove_if_unused(parent);
  // The end of the chain first, so that it makes room first.
  for (const auto* places : {&restore.places, &restore.kept})
    for (size_t i = places->size(); i-- > 0;) drop_outside((*places)[i].group, (*places)[i].block);
  PrefixMatch now{.name_space = match.name_space, .keys = match.keys};
  look_up(prompt, now);
  index_.unpin(root);
  return now.cached.n;
}

}  // namespace pagedkv
