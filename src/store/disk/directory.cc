#include "store/disk/directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "base/text.h"

namespace pagedkv {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFormat = "pagedkv blocks ";
constexpr std::string_view kVersion = "1";

Status refused(const std::string& path, const char* what, int error) {
  return Status(Code::kUnavailable, str("[disk] ", path, ": ", what, ": ", std::strerror(error)));
}

Status make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return Status();
  return refused(path, "cannot be made", errno);
}

// The content of a small file; nothing if it is not there.
Result<std::string> read_small(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (file < 0 && errno == ENOENT) return std::string();
  if (file < 0) return refused(path, "cannot be read", errno);
  char text[256];
  const ssize_t n = ::read(file, text, sizeof text);
  const int error = errno;
  ::close(file);
  if (n < 0) return refused(path, "cannot be read", error);
  return std::string(text, size_t(n));
}

Status write_small(const std::string& path, const std::string& text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return refused(path, "cannot be made", errno);
  const ssize_t n = ::write(file, text.data(), text.size());
  const int error = n < 0 ? errno : ENOSPC;
  const bool synced = ::fsync(file) == 0;
  ::close(file);
  if (n == ssize_t(text.size()) && synced) return Status();
  ::unlink(path.c_str());
  return refused(path, "cannot be written", error);
}

std::string new_id() {
  uint8_t bytes[16] = {};
  if (getrandom(bytes, sizeof bytes, 0) != ssize_t(sizeof bytes)) return str(::getpid());
  std::string id;
  for (const uint8_t byte : bytes) {
    id += "0123456789abcdef"[byte >> 4];
    id += "0123456789abcdef"[byte & 15];
  }
  return id;
}

bool is_empty_but_for_lock(const std::string& path) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(path, error))
    if (entry.path().filename() != "lock") return false;
  return !error;
}

// A folder that somebody else filled is left alone; one of another version is never converted in place.
Status check_format(const std::string& path) {
  const auto format = read_small(path + "/format");
  if (!format.ok()) return format.status();
  if (format->empty()) {
    if (!is_empty_but_for_lock(path))
      return Status(Code::kUnsupported,
                    str("[disk] ", path, " holds files and is no folder of blocks; name an empty or a new one"));
    return write_small(path + "/format", str(kFormat, kVersion, "\n", new_id(), "\n"));
  }
  const std::string first = format->substr(0, format->find('\n'));
  if (!first.starts_with(kFormat))
    return Status(Code::kUnsupported, str("[disk] ", path, " is no folder of blocks; name an empty or a new one"));
  if (first.substr(kFormat.size()) != kVersion)
    return Status(Code::kUnsupported,
                  str("[disk] ", path, " has format \"", first.substr(0, 40), "\", this program writes version ",
                      kVersion, "; delete the folder, or name another one"));
  return Status();
}

}  // namespace

Result<Directory> Directory::open(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos)
    return invalid_argument("[disk] the name of a folder is missing");
  if (Status status = make_folder(path); !status.ok()) return status;
  const std::string lock_path = path + "/lock";
  const int lock = ::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock < 0) return refused(lock_path, "cannot be opened", errno);
  Directory out(path, lock);
  if (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return refused(lock_path, "cannot be locked", errno);
    char holder[24] = {};
    const ssize_t n = ::pread(lock, holder, sizeof holder - 1, 0);
    return Status(Code::kUnavailable, str("[disk] ", path, " is in use by process ", n > 0 ? holder : "unknown",
                                          "; one process uses a folder at a time"));
  }
  if (Status status = check_format(path); !status.ok()) return status;
  const std::string self = str(::getpid());
  if (::ftruncate(lock, 0) != 0 || ::pwrite(lock, self.data(), self.size(), 0) < 0) errno = 0;  // for messages only
  if (Status status = make_folder(out.chunks_path()); !status.ok()) return status;
  out.make_reserve();
  return out;
}

Directory::~Directory() {
  if (lock_ >= 0) ::close(lock_);
}

Directory::Directory(Directory&& other) noexcept
    : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}

int64_t Directory::bytes() const {
  int64_t total = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator at(path_, error), end; !error && at != end; at.increment(error)) {
    struct stat facts {};
    if (::lstat(at->path().c_str(), &facts) == 0) total += int64_t(facts.st_blocks) * 512;
  }
  return total;
}

bool Directory::is_there() const {
  struct stat named {
  }, held{};
  return ::lstat((path_ + "/lock").c_str(), &named) == 0 && ::fstat(lock_, &held) == 0 &&
         named.st_dev == held.st_dev && named.st_ino == held.st_ino;
}

void Directory::give_reserve_up() const { ::unlink((path_ + "/reserve").c_str()); }

void Directory::make_reserve() const {
  const std::string path = path_ + "/reserve";
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return;
  const bool made = posix_fallocate(file, 0, kReserveBytes) == 0;
  ::close(file);
  if (!made) ::unlink(path.c_str());
}

}  // namespace pagedkv
