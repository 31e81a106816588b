// The folder of a disk tier: made with the right modes, of our format and version, and of one process at a time.
//
//   DIR/format    "pagedkv blocks 1" and an id          DIR/lock     held by the process that uses it
//   DIR/index.db  SQLite (index.h)                      DIR/chunks/  images (chunks.h)
//   DIR/reserve   room for the index where the disk is full
#pragma once

#include <cstdint>
#include <string>

#include "pagedkv/status.h"

namespace pagedkv {

class Directory {
 public:
  static constexpr int64_t kReserveBytes = int64_t{1} << 20;

  // Makes what is missing and takes the lock. Errors: kUnavailable, kUnsupported.
  static Result<Directory> open(const std::string& path);
  ~Directory();
  Directory(Directory&& other) noexcept;
  Directory& operator=(Directory&&) = delete;

  const std::string& path() const { return path_; }
  std::string index_path() const { return path_ + "/index.db"; }
  std::string chunks_path() const { return path_ + "/chunks"; }
  // As it lies on the disk, chunks included.
  int64_t bytes() const;
  // False: it was deleted, or another one has its name.
  bool is_there() const;
  // The reserve makes room when nothing else can, and is made again when there is room.
  void give_reserve_up() const;
  void make_reserve() const;

 private:
  Directory(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}
  std::string path_;
  int lock_ = -1;
};

}  // namespace pagedkv
