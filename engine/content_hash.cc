#include "engine/content_hash.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <optional>
#include <span>
#include <sstream>
#include <vector>

#include "engine/sha256.h"

namespace pagedkv::engine {
namespace {

constexpr size_t kStep = 1 << 20;
constexpr size_t kMostLines = 256;  // of a memo: older ones go

struct File {
  int fd = -1;
  ~File() {
    if (fd >= 0) ::close(fd);
  }
};

// What changes whenever the file does.
std::string state_of(const struct stat& s) {
  std::ostringstream out;
  out << s.st_dev << ' ' << s.st_ino << ' ' << s.st_size << ' ' << s.st_mtim.tv_sec << '.' << s.st_mtim.tv_nsec
      << ' ' << s.st_ctim.tv_sec << '.' << s.st_ctim.tv_nsec;
  return out.str();
}

std::optional<PrefixKey> from_hex(const std::string& text) {
  PrefixKey key;
  if (text.size() != 2 * key.bytes.size()) return std::nullopt;
  for (size_t i = 0; i < key.bytes.size(); ++i) {
    unsigned byte = 0;
    if (std::sscanf(text.c_str() + 2 * i, "%2x", &byte) != 1) return std::nullopt;
    key.bytes[i] = uint8_t(byte);
  }
  return key;
}

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// "<hash> <state>", the latest last. Written beside the old one and renamed: a memo is whole or not there.
void remember(const std::string& memo, const std::string& state, const PrefixKey& key) {
  std::vector<std::string> lines = lines_of(memo);
  lines.push_back(hex(key) + ' ' + state);
  const std::string part = memo + ".part";
  File file{::open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)};
  if (file.fd < 0) return;
  std::string text;
  const auto latest = std::span(lines).last(std::min(lines.size(), kMostLines));
  for (const std::string& line : latest) text += line + '\n';
  if (::write(file.fd, text.data(), text.size()) == ssize_t(text.size())) ::rename(part.c_str(), memo.c_str());
}

std::optional<PrefixKey> remembered(const std::string& memo, const std::string& state) {
  const std::vector<std::string> lines = lines_of(memo);
  const auto line = std::find_if(lines.rbegin(), lines.rend(), [&](const std::string& one) {
    const size_t space = one.find(' ');
    return space != std::string::npos && one.substr(space + 1) == state;
  });
  return line == lines.rend() ? std::nullopt : from_hex(line->substr(0, line->find(' ')));
}

Status failed(const std::string& path) {
  return Status(errno == ENOENT ? Code::kNotFound : Code::kUnavailable, path + ": " + std::strerror(errno));
}

}  // namespace

std::optional<PrefixKey> known_content_hash(const std::string& path, const std::string& memo) {
  struct stat now = {};
  if (memo.empty() || stat(path.c_str(), &now) != 0) return std::nullopt;
  return remembered(memo, state_of(now));
}

Result<PrefixKey> content_hash(const std::string& path, const std::string& memo, const std::atomic<bool>& stop) {
  const File file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  struct stat before = {};
  if (file.fd < 0 || fstat(file.fd, &before) != 0) return failed(path);
  const std::string state = state_of(before);

  Sha256 hash;
  std::vector<char> buffer(kStep);
  for (;;) {
    if (stop) return Status(Code::kUnavailable, path + ": stopped while it was being read");
    const ssize_t n = ::read(file.fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return failed(path);
    if (n == 0) break;
    hash.add(buffer.data(), size_t(n));
  }
  const auto key = hash.finish();
  if (!key) return Status(Code::kUnavailable, path + ": SHA-256 failed in OpenSSL");
  struct stat after = {};
  if (!memo.empty() && fstat(file.fd, &after) == 0 && state_of(after) == state) remember(memo, state, *key);
  return *key;
}

}  // namespace pagedkv::engine
