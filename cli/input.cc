#include "cli/input.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "engine/text.h"

namespace pagedkv::cli {

Result<std::string> read_text(const std::string& what, const std::string& path) {
  const bool from_stdin = path == "-";
  const std::string name = from_stdin ? "stdin" : path;
  struct stat about {};
  if (!from_stdin) {
    if (stat(path.c_str(), &about) != 0)
      return Status(Code::kNotFound, fmt::format("[{}] {}: {}", what, name, std::strerror(errno)));
    if (S_ISDIR(about.st_mode)) return invalid_argument(fmt::format("[{}] {} is a directory", what, name));
  }
  struct Close {
    void operator()(std::FILE* file) const {
      if (file != stdin) std::fclose(file);
    }
  };
  const std::unique_ptr<std::FILE, Close> file(from_stdin ? stdin : std::fopen(path.c_str(), "rb"));
  if (!file) return Status(Code::kUnavailable, fmt::format("[{}] {}: {}", what, name, std::strerror(errno)));
  std::string content;
  char chunk[1 << 16];
  while (const size_t n = std::fread(chunk, 1, sizeof chunk, file.get())) {
    content.append(chunk, n);
    if (content.size() > kMaxTextBytes)
      return invalid_argument(fmt::format("[{}] {} has more than {} bytes", what, name, kMaxTextBytes));
  }
  if (std::ferror(file.get()))
    return Status(Code::kUnavailable, fmt::format("[{}] {}: {}", what, name, std::strerror(errno)));
  if (content.ends_with('\n')) content.pop_back();
  if (content.empty()) return invalid_argument(fmt::format("[{}] {} is empty", what, name));
  if (Status status = check_utf8(what, path, content); !status.ok()) return status;
  return content;
}

Status check_utf8(const std::string& what, const std::string& name, const std::string& text) {
  const int64_t at = engine::find_invalid_utf8(text);
  if (at < 0) return Status();
  return invalid_argument(fmt::format("[{}] {} is not valid UTF-8: byte {} of {} is 0x{:02x}", what, name, at,
                                      text.size(), static_cast<unsigned char>(text[size_t(at)])));
}

}  // namespace pagedkv::cli
