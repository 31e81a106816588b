// What the disk tier asks of the operating system, as one class, so that tests can put a disk below it that fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace pagedkv {

// Any thread. Calls give what the system call gives, or errno's value with a minus.
class Files {
 public:
  virtual ~Files() = default;
  virtual int open(const std::string& path, int flags, int mode);
  virtual void close(int file);
  // All of `bytes`, or an error; the end of the file is one (-EIO).
  virtual int64_t read(int file, std::span<std::byte> bytes, int64_t offset);
  // What is in memory already: -EAGAIN when it is not.
  virtual int64_t read_cached(int file, std::span<std::byte> bytes, int64_t offset);
  virtual int64_t write(int file, std::span<const std::byte> bytes, int64_t offset);
  virtual int allocate(int file, int64_t bytes);  // on the disk, not only as a length
  virtual int sync(int file);                     // content and what is needed to find it
  virtual int unlink(const std::string& path);
  virtual int64_t length(int file);
};

// The system itself.
Files& system_files();

}  // namespace pagedkv
