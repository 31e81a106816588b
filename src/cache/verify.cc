// Every invariant of blocks, tables, keys and counters, walked in full.

#include <algorithm>
#include <map>

#include "base/text.h"
#include "cache/cache_core.h"

namespace pagedkv {

Status CacheCore::verify() const {
  std::string first;
  const Problem problem = [&](const std::string& text) {
    if (first.empty()) first = text;
  };
  verify_tables(problem);
  verify_sequences(problem);
  verify_index(problem);
  return first.empty() ? Status() : Status(Code::kInternal, "[verify] " + first);
}

// Tables and pools: every block is held as often as tables name it, and carries the key that the index has.
void CacheCore::verify_tables(const Problem& problem) const {
  const int64_t block_size = options_.block_size;
  for (int g = 0; g < n_groups(); ++g) {
    const BlockPool& pool = *pools_[size_t(g)];
    std::vector<uint32_t> holders(size_t(pool.end_id()));
    for (const auto& [block, n] : outside_[size_t(g)]) holders[size_t(block)] += n;
    for (const Sequence& s : sequences_) {
      if (!s.live) continue;
      const Table& table = s.tables[size_t(g)];
      if (s.step == 0 && int64_t(table.ids.size()) != (s.length + block_size - 1) / block_size)
        problem(str("a table of ", table.ids.size(), " blocks for ", s.length, " tokens in group ", g));
      for (size_t i = 0; i < table.ids.size(); ++i) {
        const BlockId block = table.ids[i];
        if ((block == kNoBlock) != (int64_t(i) < table.first_held))
          problem(str("block ", i, " of a table and its window disagree in group ", g));
        if (block == kNoBlock) continue;
        if (int64_t(block) >= pool.end_id())
          problem(str("a table names block ", int64_t(block), " of ", pool.end_id()));
        else
          ++holders[size_t(block)];
      }
    }
    pool.verify(holders,
                [&](const char* what, int64_t where) { problem(str("group ", g, ": ", what, " (", where, ")")); });
    for (int64_t id = 0; id < pool.end_id(); ++id) {
      const uint32_t entry = pool.entry(BlockId(id));
      if (entry == kNoEntry) continue;
      if (entry >= index_.end_entry() || index_.block(entry, g) != BlockId(id))
        problem(str("group ", g, ": block ", id, " carries a key that the index has elsewhere"));
    }
  }
}

// Sequences and the entries that they stand on.
void CacheCore::verify_sequences(const Problem& problem) const {
  const int64_t block_size = options_.block_size;
  for (const Sequence& s : sequences_) {
    if (!s.live) continue;
    if (s.step == 0 && int64_t(s.tokens.size()) > s.length) problem("more token ids than tokens");
    uint32_t node = s.node;
    for (int64_t i = s.node_blocks; i > 0 && node != PrefixIndex::kNone; --i, node = index_.parent(node)) {
      const auto own = std::span<const int32_t>(s.tokens).subspan(size_t((i - 1) * block_size), size_t(block_size));
      if (!std::ranges::equal(index_.tokens(node), own)) problem("a sequence stands on an entry of other tokens");
    }
    if (s.open_entry != PrefixIndex::kNone) {
      if (index_.kind(s.open_entry) != PrefixIndex::Kind::kOpen || index_.parent(s.open_entry) != s.node)
        problem("an open entry is not below its sequence's node");
    }
  }
}

// Entries, their blocks, and how often each is referred to.
void CacheCore::verify_index(const Problem& problem) const {
  std::map<uint32_t, uint32_t> pins, children;
  for (const Sequence& s : sequences_)
    if (s.live && s.node != PrefixIndex::kNone) ++pins[s.node];
  size_t keys = 0;
  for (uint32_t entry = 0; entry < index_.end_entry(); ++entry) {
    const auto kind = index_.kind(entry);
    if (kind == PrefixIndex::Kind::kFreeSlot) continue;
    if (index_.parent(entry) != PrefixIndex::kNone) ++children[index_.parent(entry)];
    const bool keyed = kind == PrefixIndex::Kind::kFull || kind == PrefixIndex::Kind::kPartial;
    keys += keyed;
    if (keyed && index_.find(index_.parent(entry), index_.key(entry), index_.tokens(entry)).entry != entry)
      problem("an entry is not found by its key");
    for (int g = 0; g < n_groups(); ++g) {
      const BlockId block = index_.block(entry, g);
      if (block == kNoBlock) continue;
      const uint32_t expected = keyed ? entry : kNoEntry;
      if (pools_[size_t(g)]->entry(block) != expected)
        problem(str("an entry names block ", int64_t(block), ", which has another key"));
      if (!keyed && pools_[size_t(g)]->holders(block) == 0) problem("an open entry names a block without holder");
    }
  }
  if (keys != index_.n_keys()) problem("the key table and the entries differ");
  for (uint32_t entry = 0; entry < index_.end_entry(); ++entry) {
    if (index_.kind(entry) == PrefixIndex::Kind::kFreeSlot) continue;
    const auto count = [&](const auto& map) {
      const auto at = map.find(entry);
      return at == map.end() ? 0u : at->second;
    };
    if (index_.refs(entry) != count(pins) + count(children))
      problem("an entry's references differ from who uses it");
  }
}

}  // namespace pagedkv
