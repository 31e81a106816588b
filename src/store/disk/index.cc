#include "store/disk/index.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "base/text.h"

namespace pagedkv {
namespace {

constexpr int kSchema = 1;

// A small page is a small write; the log is kept short, so that the folder's size stays within its budget.
constexpr const char* kPragmas =
    "PRAGMA page_size=4096; PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=256;"
    "PRAGMA journal_size_limit=1048576; PRAGMA mmap_size=0; PRAGMA cell_size_check=ON; PRAGMA cache_size=-4096;"
    "PRAGMA locking_mode=EXCLUSIVE; PRAGMA trusted_schema=OFF; PRAGMA temp_store=MEMORY;";

constexpr const char* kTables =
    "CREATE TABLE IF NOT EXISTS block(id INTEGER PRIMARY KEY, key BLOB NOT NULL, parent BLOB NOT NULL,"
    " grp INTEGER NOT NULL, depth INTEGER NOT NULL, chunk INTEGER NOT NULL, slot INTEGER NOT NULL,"
    " slot_bytes INTEGER NOT NULL, image_bytes INTEGER NOT NULL, used INTEGER NOT NULL, expires INTEGER NOT NULL);"
    "CREATE UNIQUE INDEX IF NOT EXISTS block_key ON block(key, grp);"
    "CREATE UNIQUE INDEX IF NOT EXISTS block_place ON block(chunk, slot);"
    "CREATE INDEX IF NOT EXISTS block_cold ON block(slot_bytes, used, depth DESC);"
    "CREATE INDEX IF NOT EXISTS block_expires ON block(expires) WHERE expires > 0;";

#define COLUMNS "id, key, parent, grp, depth, chunk, slot, slot_bytes, image_bytes, used, expires"

enum Which {
  kFind,
  kInsert,
  kErase,
  kEraseChunk,
  kTouch,
  kColdest,
  kAny,
  kChunks,
  kExpired,
  kOfKey,
  kAll,
  kWhiches
};

constexpr std::array<const char*, kWhiches> kSql = {
    "SELECT " COLUMNS " FROM block WHERE key = ? AND grp = ?",
    "INSERT OR REPLACE INTO block(key, parent, grp, depth, chunk, slot, slot_bytes, image_bytes, used, expires)"
    " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    "DELETE FROM block WHERE id = ?",
    "DELETE FROM block WHERE chunk = ?",
    "WITH RECURSIVE chain(k) AS (VALUES(?1) UNION SELECT parent FROM block JOIN chain ON key = k WHERE used < ?2)"
    " UPDATE block SET used = ?2 WHERE key IN (SELECT k FROM chain)",
    "SELECT " COLUMNS " FROM block WHERE slot_bytes = ? ORDER BY used, depth DESC LIMIT 1",
    "SELECT " COLUMNS " FROM block LIMIT 1",
    "SELECT chunk, MAX(used), COUNT(*), SUM(image_bytes) FROM block GROUP BY chunk ORDER BY 2",
    "SELECT " COLUMNS " FROM block WHERE expires > 0 AND expires <= ? LIMIT ?",
    "SELECT " COLUMNS " FROM block WHERE key = ?",
    "SELECT " COLUMNS " FROM block",
};

void bind(sqlite3_stmt* statement, int at, const PrefixKey& key) {
  sqlite3_bind_blob(statement, at, key.bytes.data(), int(key.bytes.size()), SQLITE_TRANSIENT);
}
void bind(sqlite3_stmt* statement, int at, int64_t number) { sqlite3_bind_int64(statement, at, number); }

PrefixKey key_at(sqlite3_stmt* statement, int column) {
  PrefixKey key;
  const void* bytes = sqlite3_column_blob(statement, column);
  if (bytes != nullptr && sqlite3_column_bytes(statement, column) == int(key.bytes.size()))
    std::memcpy(key.bytes.data(), bytes, key.bytes.size());
  return key;
}

IndexRow row_at(sqlite3_stmt* s) {
  return {.id = sqlite3_column_int64(s, 0),
          .key = key_at(s, 1),
          .parent = key_at(s, 2),
          .group = uint32_t(sqlite3_column_int64(s, 3)),
          .depth = uint32_t(sqlite3_column_int64(s, 4)),
          .place = {sqlite3_column_int64(s, 5), sqlite3_column_int64(s, 6)},
          .slot_bytes = sqlite3_column_int64(s, 7),
          .image_bytes = sqlite3_column_int64(s, 8),
          .used = sqlite3_column_int64(s, 9),
          .expires = sqlite3_column_int64(s, 10)};
}

}  // namespace

Status BlockIndex::error(const char* what) const {
  const int code = sqlite3_errcode(database_) & 0xff;
  const Code kind = code == SQLITE_FULL                               ? Code::kCapacity
                    : code == SQLITE_CORRUPT || code == SQLITE_NOTADB ? Code::kCorrupt
                                                                      : Code::kUnavailable;
  return Status(kind, str("[disk] index: ", what, ": ", sqlite3_errmsg(database_)));
}

Status BlockIndex::execute(const char* sql) {
  return sqlite3_exec(database_, sql, nullptr, nullptr, nullptr) == SQLITE_OK ? Status() : error(sql);
}

Result<std::unique_ptr<BlockIndex>> BlockIndex::open(const std::string& path, bool check) {
  // SQLite gives its log the mode of the database, which it would make with that of the process's mask.
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file >= 0) ::close(file);
  sqlite3* database = nullptr;
  const int opened = sqlite3_open_v2(path.c_str(), &database, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, nullptr);
  std::unique_ptr<BlockIndex> index(new BlockIndex(database));
  if (opened != SQLITE_OK) return index->error("open");
  if (Status status = index->execute(kPragmas); !status.ok()) return status;
  int version = -1;
  const auto one_number = [](void* to, int, char** values, char**) {
    *static_cast<int*>(to) = values[0] != nullptr ? std::atoi(values[0]) : -1;
    return 0;
  };
  if (sqlite3_exec(database, "PRAGMA user_version", one_number, &version, nullptr) != SQLITE_OK)
    return index->error("version");
  if (version != 0 && version != kSchema)
    return Status(Code::kCorrupt, str("[disk] index: schema ", version, ", this program's is ", kSchema));
  if (check && version != 0) {
    std::string verdict;
    const auto first_word = [](void* to, int, char** values, char**) {
      auto& text = *static_cast<std::string*>(to);
      if (text.empty() && values[0] != nullptr) text = values[0];
      return 0;
    };
    if (sqlite3_exec(database, "PRAGMA integrity_check(1)", first_word, &verdict, nullptr) != SQLITE_OK)
      return index->error("check");
    if (verdict != "ok") return Status(Code::kCorrupt, "[disk] index: " + verdict);
  }
  if (Status status = index->execute(kTables); !status.ok()) return status;
  if (Status status = index->execute(str("PRAGMA user_version=", kSchema).c_str()); !status.ok()) return status;
  index->statements_.resize(kWhiches);
  return index;
}

BlockIndex::~BlockIndex() {
  for (sqlite3_stmt* statement : statements_) sqlite3_finalize(statement);
  sqlite3_close(database_);
}

Result<sqlite3_stmt*> BlockIndex::prepared(int which) {
  sqlite3_stmt*& statement = statements_[size_t(which)];
  if (statement == nullptr && sqlite3_prepare_v3(database_, kSql[size_t(which)], -1, SQLITE_PREPARE_PERSISTENT,
                                                 &statement, nullptr) != SQLITE_OK)
    return error("prepare");
  return statement;
}

// Steps a statement that is bound to its end, and leaves it ready for the next time.
Status BlockIndex::run(sqlite3_stmt* statement, const std::function<void(sqlite3_stmt*)>& row) {
  int result = 0;
  while ((result = sqlite3_step(statement)) == SQLITE_ROW) row(statement);
  Status status = result == SQLITE_DONE ? Status() : error(sqlite3_sql(statement));
  sqlite3_reset(statement);
  return status;
}

template <class... Values>
Result<sqlite3_stmt*> BlockIndex::bound(int which, const Values&... values) {
  auto statement = prepared(which);
  int at = 0;
  if (statement.ok()) (bind(*statement, ++at, values), ...);
  return statement;
}

template <class... Values>
Status BlockIndex::change(int which, const Values&... values) {
  const auto statement = bound(which, values...);
  return statement.ok() ? run(*statement, [](sqlite3_stmt*) {}) : statement.status();
}

template <class... Values>
Result<std::vector<IndexRow>> BlockIndex::select(int which, const Values&... values) {
  const auto statement = bound(which, values...);
  if (!statement.ok()) return statement.status();
  std::vector<IndexRow> out;
  Status status = run(*statement, [&](sqlite3_stmt* s) { out.push_back(row_at(s)); });
  if (!status.ok()) return status;
  return out;
}

namespace {

Result<std::optional<IndexRow>> first_of(Result<std::vector<IndexRow>> rows) {
  if (!rows.ok()) return rows.status();
  return rows->empty() ? std::nullopt : std::optional(rows->front());
}

}  // namespace

Result<std::optional<IndexRow>> BlockIndex::find(const PrefixKey& key, uint32_t group) {
  return first_of(select(kFind, key, int64_t(group)));
}

Status BlockIndex::insert(const IndexRow& row) {
  return change(kInsert, row.key, row.parent, int64_t(row.group), int64_t(row.depth), row.place.chunk,
                row.place.slot, row.slot_bytes, row.image_bytes, row.used, row.expires);
}

Status BlockIndex::erase(int64_t id) { return change(kErase, id); }
Status BlockIndex::erase_chunk(int64_t chunk) { return change(kEraseChunk, chunk); }
Status BlockIndex::touch_chain(const PrefixKey& last, int64_t now) { return change(kTouch, last, now); }

Result<std::optional<IndexRow>> BlockIndex::coldest(int64_t slot_bytes) {
  return first_of(select(kColdest, slot_bytes));
}

Result<bool> BlockIndex::is_empty() {
  const auto any = select(kAny);
  if (!any.ok()) return any.status();
  return any->empty();
}

Result<std::vector<BlockIndex::ChunkUse>> BlockIndex::chunks_by_use() {
  const auto statement = bound(kChunks);
  if (!statement.ok()) return statement.status();
  std::vector<ChunkUse> out;
  Status status = run(*statement, [&](sqlite3_stmt* s) {
    out.push_back({sqlite3_column_int64(s, 0), sqlite3_column_int64(s, 1), sqlite3_column_int64(s, 2),
                   sqlite3_column_int64(s, 3)});
  });
  if (!status.ok()) return status;
  return out;
}

Result<std::vector<IndexRow>> BlockIndex::expired(int64_t now, int64_t most) { return select(kExpired, now, most); }
Result<std::vector<IndexRow>> BlockIndex::rows_of(const PrefixKey& key) { return select(kOfKey, key); }

Status BlockIndex::each(const std::function<void(const IndexRow&)>& row) {
  const auto statement = bound(kAll);
  return statement.ok() ? run(*statement, [&](sqlite3_stmt* s) { row(row_at(s)); }) : statement.status();
}

Status BlockIndex::begin() { return execute("BEGIN IMMEDIATE"); }
Status BlockIndex::end() { return execute("COMMIT"); }
void BlockIndex::undo() {
  if (sqlite3_get_autocommit(database_) == 0) sqlite3_exec(database_, "ROLLBACK", nullptr, nullptr, nullptr);
}

Status BlockIndex::checkpoint() {
  return sqlite3_wal_checkpoint_v2(database_, nullptr, SQLITE_CHECKPOINT_TRUNCATE, nullptr, nullptr) == SQLITE_OK
             ? Status()
             : error("checkpoint");
}

}  // namespace pagedkv
