// Builds the text of messages: str("[op] got ", n, ", the limit is ", limit).
#pragma once

#include <locale>
#include <sstream>
#include <string>

namespace pagedkv {

// Messages, JSON and keys read the same whatever locale the host program has set.
template <class... Pieces>
std::string str(const Pieces&... pieces) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  (out << ... << pieces);
  return std::move(out).str();
}

// "1.5 GiB (1610612736 bytes)", "512 bytes".
inline std::string bytes_text(int64_t bytes) {
  const char* unit = bytes >= (int64_t{1} << 30) ? "GiB"
                     : bytes >= (1 << 20)        ? "MiB"
                     : bytes >= 1024             ? "KiB"
                                                 : nullptr;
  if (unit == nullptr) return str(bytes, " bytes");
  const double scale = unit[0] == 'G' ? 1 << 30 : unit[0] == 'M' ? 1 << 20 : 1024;
  std::ostringstream out;
  out.imbue(std::locale::classic());
  out.precision(1);
  out << std::fixed << double(bytes) / scale << " " << unit << " (" << bytes << " bytes)";
  return std::move(out).str();
}

}  // namespace pagedkv
