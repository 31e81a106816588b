// Which block lies in which slot: an SQLite database. It may be lost: every slot says itself what it holds.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pagedkv/prefix.h"
#include "pagedkv/status.h"
#include "store/disk/chunks.h"

struct sqlite3;
struct sqlite3_stmt;

namespace pagedkv {

struct IndexRow {
  int64_t id = 0;
  PrefixKey key{}, parent{};
  uint32_t group = 0, depth = 0;
  SlotPlace place{};
  int64_t slot_bytes = 0;   // of the slot
  int64_t image_bytes = 0;  // of the image in it
  int64_t used = 0;         // when it was last used; equal within a chain that was used at once
  int64_t expires = 0;      // in seconds since 1970; 0: never
};

// One thread at a time. Errors: kCapacity when the disk is full, kCorrupt when the database is damaged,
// kUnavailable.
class BlockIndex {
 public:
  // kCorrupt: it is there, and no database of ours. `check`: reads it whole first.
  static Result<std::unique_ptr<BlockIndex>> open(const std::string& path, bool check);
  ~BlockIndex();
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  Result<std::optional<IndexRow>> find(const PrefixKey& key, uint32_t group);
  // Replaces what lies in its place or has its key and group.
  Status insert(const IndexRow& row);
  Status erase(int64_t id);
  Status erase_chunk(int64_t chunk);
  // The block and all before it in its chain were used now.
  Status touch_chain(const PrefixKey& last, int64_t now);
  // Who makes room first: least recently used, the ends of chains before their beginnings.
  Result<std::optional<IndexRow>> coldest(int64_t slot_bytes);
  Result<bool> is_empty();
  // Chunks with their blocks, and when one of these was last used; coldest first.
  struct ChunkUse {
    int64_t chunk, used, blocks, image_bytes;
  };
  Result<std::vector<ChunkUse>> chunks_by_use();
  Result<std::vector<IndexRow>> expired(int64_t now, int64_t most);
  Result<std::vector<IndexRow>> rows_of(const PrefixKey& key);
  Status each(const std::function<void(const IndexRow&)>& row);
  // All changes until the matching end are one: on the disk together or not at all.
  Status begin();
  Status end();
  void undo();
  // Writes the log into the database and cuts it off.
  Status checkpoint();

 private:
  explicit BlockIndex(sqlite3* database) : database_(database) {}
  Result<sqlite3_stmt*> prepared(int which);
  Status execute(const char* sql);
  Status run(sqlite3_stmt* statement, const std::function<void(sqlite3_stmt*)>& row);
  // A prepared statement with these values, what it changes, and the rows that it gives.
  template <class... Values>
  Result<sqlite3_stmt*> bound(int which, const Values&... values);
  template <class... Values>
  Status change(int which, const Values&... values);
  template <class... Values>
  Result<std::vector<IndexRow>> select(int which, const Values&... values);
  Status error(const char* what) const;

  sqlite3* database_;
  std::vector<sqlite3_stmt*> statements_;
};

}  // namespace pagedkv
