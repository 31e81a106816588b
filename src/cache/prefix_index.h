// Which token prefixes have blocks: a tree of entries, one for each block's worth of tokens after a prefix.
//
// A full entry is found by its key (chained SHA-256), and the hit counts only if parent and token ids are equal
// too, so a collision is a miss. A partial entry is what a finished sequence leaves of its last block; an open
// entry is the last block of a live sequence: both are matched by tokens. An entry may lack the block of some group
// (evicted, or behind a window); it goes when it has no blocks, no children and no sequence that stands on it. One
// thread.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/hash.h"
#include "cache/key_table.h"
#include "pagedkv/units.h"

namespace pagedkv {

class PrefixIndex {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;
  enum class Kind : uint8_t { kFreeSlot, kRoot, kFull, kPartial, kOpen };

  // The key of these tokens under a parent's key.
  using HashFunction = Key (*)(const Key& parent, std::span<const int32_t> tokens);

  PrefixIndex(int64_t block_size, int n_groups, HashFunction hash)
      : hash(hash), block_size_(block_size), n_groups_(n_groups) {}

  const HashFunction hash;

  // The entry above all prompts of a namespace; made when missing.
  uint32_t root(std::string_view name_space, const Key& descriptor);
  uint32_t find_root(std::string_view name_space) const {
    const auto found = roots_.find(name_space);
    return found == roots_.end() ? kNone : found->second;
  }
  // A sequence stands on the entry: it stays, with all its ancestors, until unpinned.
  void pin(uint32_t entry) { ++entries_[entry].refs; }
  void unpin(uint32_t entry);

  struct Found {
    uint32_t entry = kNone;
    bool collision = false;  // a key was equal, parent or tokens were not
  };
  Found find(uint32_t parent, const Key& key, std::span<const int32_t> tokens) const;
  // Requires: find() does not find it. `kind`: full or partial.
  uint32_t add(uint32_t parent, const Key& key, std::span<const int32_t> tokens, Kind kind);
  uint32_t add_open(uint32_t parent);
  // What an open entry's block holds by now.
  void set_open_tokens(uint32_t entry, std::span<const int32_t> tokens);

  // The child of `parent` that shares most leading tokens with `tokens`, has a block in every group, and how many.
  struct Partial {
    uint32_t entry = kNone;
    int64_t n_tokens = 0;
  };
  Partial best_partial(uint32_t parent, std::span<const int32_t> tokens) const;

  BlockId block(uint32_t entry, int group) const {
    return blocks_[size_t(entry) * size_t(n_groups_) + size_t(group)];
  }
  void set_block(uint32_t entry, int group, BlockId block) {
    blocks_[size_t(entry) * size_t(n_groups_) + size_t(group)] = block;
  }
  // The entry lost its block in this group to eviction; it may vanish.
  void forget_block(uint32_t entry, int group);
  // Removes a partial or open entry whose blocks the caller has taken out.
  void remove_if_unused(uint32_t entry);

  const Key& key(uint32_t entry) const { return entries_[entry].key; }
  uint32_t parent(uint32_t entry) const { return entries_[entry].parent; }
  Kind kind(uint32_t entry) const { return entries_[entry].kind; }
  std::span<const int32_t> tokens(uint32_t entry) const {
    return {tokens_.data() + size_t(entry) * size_t(block_size_), size_t(entries_[entry].n_tokens)};
  }
  // A full block with this key was here and made room. Remembers the most recent evictions only.
  bool was_evicted(const Key& key) const {
    return !ghosts_.empty() && ghosts_[key_tag(key) % ghosts_.size()] == key_tag(key);
  }

  size_t size() const { return entries_.size() - free_entries_.size(); }
  uint32_t end_entry() const { return uint32_t(entries_.size()); }
  uint32_t refs(uint32_t entry) const { return entries_[entry].refs; }
  size_t n_keys() const { return table_.size(); }

 private:
  struct Entry {
    Key key;
    uint32_t parent = kNone;
    uint32_t first_child = kNone, next_sibling = kNone, prev_sibling = kNone;
    uint32_t refs = 0;  // children + sequences that stand here
    int32_t n_tokens = 0;
    Kind kind = Kind::kFreeSlot;
  };
  // Candidates that a partial match looks at, most recent first: bounds the cost under a root with many children.
  static constexpr int kMaxCandidates = 64;
  static constexpr size_t kGhosts = 16384;

  uint32_t make(uint32_t parent, Kind kind);
  void set_tokens(uint32_t entry, std::span<const int32_t> tokens);
  bool has_blocks(uint32_t entry) const;
  bool has_all_blocks(uint32_t entry) const;

  int64_t block_size_;
  int n_groups_;
  std::vector<Entry> entries_;
  std::vector<int32_t> tokens_;  // [entry, block_size]
  std::vector<BlockId> blocks_;  // [entry, group]
  std::vector<uint32_t> free_entries_;
  KeyTable table_;  // full and partial entries
  std::map<std::string, uint32_t, std::less<>> roots_;
  std::vector<uint64_t> ghosts_;  // tags of evicted keys, by tag modulo size
};

}  // namespace pagedkv
