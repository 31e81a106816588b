#include "store/disk/files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

namespace pagedkv {
namespace {

// Repeats a transfer of part of the bytes until all are through. The call gets pointer, size and offset.
template <class Byte, class Call>
int64_t whole(std::span<Byte> bytes, int64_t offset, Call call) {
  size_t done = 0;
  while (done < bytes.size()) {
    const int64_t n = call(bytes.data() + done, bytes.size() - done, offset + int64_t(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -errno;
    if (n == 0) return -EIO;
    done += size_t(n);
  }
  return int64_t(done);
}

}  // namespace

int Files::open(const std::string& path, int flags, int mode) {
  const int file = ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode);
  return file < 0 ? -errno : file;
}

void Files::close(int file) { ::close(file); }

int64_t Files::read(int file, std::span<std::byte> bytes, int64_t offset) {
  return whole(bytes, offset, [&](std::byte* to, size_t n, int64_t at) { return ::pread(file, to, n, at); });
}

int64_t Files::read_cached(int file, std::span<std::byte> bytes, int64_t offset) {
  const iovec to{.iov_base = bytes.data(), .iov_len = bytes.size()};
  const ssize_t n = ::preadv2(file, &to, 1, offset, RWF_NOWAIT);
  if (n < 0) return errno == EINTR || errno == EOPNOTSUPP ? -EAGAIN : -errno;
  return n == ssize_t(bytes.size()) ? n : -EAGAIN;
}

int64_t Files::write(int file, std::span<const std::byte> bytes, int64_t offset) {
  return whole(bytes, offset,
               [&](const std::byte* from, size_t n, int64_t at) { return ::pwrite(file, from, n, at); });
}

int Files::allocate(int file, int64_t bytes) { return -posix_fallocate(file, 0, bytes); }

int Files::sync(int file) { return ::fdatasync(file) < 0 ? -errno : 0; }

int Files::unlink(const std::string& path) { return ::unlink(path.c_str()) < 0 ? -errno : 0; }

int64_t Files::length(int file) {
  struct stat facts {};
  return ::fstat(file, &facts) < 0 ? -errno : int64_t(facts.st_size);
}

Files& system_files() {
  static Files files;
  return files;
}

}  // namespace pagedkv
