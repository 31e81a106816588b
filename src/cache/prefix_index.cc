#include "cache/prefix_index.h"

#include <algorithm>

#include "base/check.h"

namespace pagedkv {

uint32_t PrefixIndex::root(std::string_view name_space, const Key& descriptor) {
  if (const auto found = roots_.find(name_space); found != roots_.end()) return found->second;
  const uint32_t entry = make(kNone, Kind::kRoot);
  entries_[entry].key = root_key(descriptor, name_space);
  roots_.emplace(name_space, entry);
  return entry;
}

uint32_t PrefixIndex::make(uint32_t parent, Kind kind) {
  uint32_t entry;
  if (!free_entries_.empty()) {
    entry = free_entries_.back();
    free_entries_.pop_back();
  } else {
    entry = uint32_t(entries_.size());
    entries_.emplace_back();
    tokens_.resize(tokens_.size() + size_t(block_size_));
    blocks_.resize(blocks_.size() + size_t(n_groups_));
  }
  Entry& e = entries_[entry];
  e = Entry{};
  e.kind = kind;
  e.parent = parent;
  for (int g = 0; g < n_groups_; ++g) set_block(entry, g, kNoBlock);
  if (parent != kNone) {
    Entry& p = entries_[parent];
    ++p.refs;
    e.next_sibling = p.first_child;
    if (p.first_child != kNone) entries_[p.first_child].prev_sibling = entry;
    p.first_child = entry;
  }
  return entry;
}

void PrefixIndex::set_tokens(uint32_t entry, std::span<const int32_t> tokens) {
  std::copy(tokens.begin(), tokens.end(), tokens_.begin() + int64_t(entry) * block_size_);
  entries_[entry].n_tokens = int32_t(tokens.size());
}

PrefixIndex::Found PrefixIndex::find(uint32_t parent, const Key& key, std::span<const int32_t> wanted) const {
  Found found;
  found.entry = table_.find(key, [&](uint32_t candidate) {
    const Entry& e = entries_[candidate];
    if (e.key != key) return false;
    const bool same = e.parent == parent && std::ranges::equal(tokens(candidate), wanted);
    found.collision |= !same;
    return same;
  });
  if (found.entry != kNone) found.collision = false;
  return found;
}

uint32_t PrefixIndex::add(uint32_t parent, const Key& key, std::span<const int32_t> tokens, Kind kind) {
  const uint32_t entry = make(parent, kind);
  entries_[entry].key = key;
  set_tokens(entry, tokens);
  table_.insert(key, entry);
  return entry;
}

uint32_t PrefixIndex::add_open(uint32_t parent) { return make(parent, Kind::kOpen); }

void PrefixIndex::set_open_tokens(uint32_t entry, std::span<const int32_t> tokens) { set_tokens(entry, tokens); }

PrefixIndex::Partial PrefixIndex::best_partial(uint32_t parent, std::span<const int32_t> wanted) const {
  Partial best;
  int looked = 0;
  for (uint32_t child = entries_[parent].first_child; child != kNone && looked < kMaxCandidates;
       child = entries_[child].next_sibling, ++looked) {
    const auto have = tokens(child);
    const auto [at, unused] = std::mismatch(have.begin(), have.end(), wanted.begin(), wanted.end());
    const int64_t n = at - have.begin();
    if (n > best.n_tokens && has_all_blocks(child)) best = {child, n};
  }
  return best;
}

bool PrefixIndex::has_blocks(uint32_t entry) const {
  for (int g = 0; g < n_groups_; ++g)
    if (block(entry, g) != kNoBlock) return true;
  return false;
}

bool PrefixIndex::has_all_blocks(uint32_t entry) const {
  for (int g = 0; g < n_groups_; ++g)
    if (block(entry, g) == kNoBlock) return false;
  return true;
}

void PrefixIndex::forget_block(uint32_t entry, int group) {
  set_block(entry, group, kNoBlock);
  if (entries_[entry].kind == Kind::kFull) {
    if (ghosts_.empty()) ghosts_.resize(kGhosts);
    const uint64_t tag = key_tag(entries_[entry].key);
    ghosts_[tag % kGhosts] = tag;
  }
  remove_if_unused(entry);
}

void PrefixIndex::unpin(uint32_t entry) {
  PKV_CHECK(entries_[entry].refs > 0);
  --entries_[entry].refs;
  remove_if_unused(entry);
}

// Goes up: the last child of an entry without blocks takes the entry with it.
void PrefixIndex::remove_if_unused(uint32_t entry) {
  while (entry != kNone) {
    Entry& e = entries_[entry];
    if (e.refs > 0 || has_blocks(entry)) return;
    if (e.kind == Kind::kFull || e.kind == Kind::kPartial) table_.erase(e.key, entry);
    if (e.kind == Kind::kRoot) std::erase_if(roots_, [&](const auto& root) { return root.second == entry; });
    const uint32_t parent = e.parent;
    if (parent != kNone) {
      if (e.prev_sibling != kNone) entries_[e.prev_sibling].next_sibling = e.next_sibling;
      if (e.next_sibling != kNone) entries_[e.next_sibling].prev_sibling = e.prev_sibling;
      if (entries_[parent].first_child == entry) entries_[parent].first_child = e.next_sibling;
      --entries_[parent].refs;
    }
    e = Entry{};
    free_entries_.push_back(entry);
    entry = parent;
  }
}

}  // namespace pagedkv
