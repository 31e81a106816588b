#include "server/request_log.h"

#include <algorithm>
#include <chrono>

namespace pagedkv::server {
namespace {

constexpr size_t kRecent = 64;

// key=value; values with anything but plain characters are quoted as JSON is.
std::string plain_text(const OrderedJson& fields) {
  std::string text;
  for (const auto& [name, value] : fields.items()) {
    std::string word = value.is_string() ? value.get<std::string>() : dump(value);
    const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
      return c > 0x20 && c != '"' && c != '=' && c < 0x7f;
    });
    if (!plain) word = dump(OrderedJson(word));
    text += (text.empty() ? "" : " ") + name + "=" + word;
  }
  return text;
}

}  // namespace

int64_t unix_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

std::string without_texts(const std::string& reason) {
  std::string out;
  bool quoted = false;
  // The JSON reader quotes what it read last in its own way, and last.
  const std::string text = reason.substr(0, reason.find("; last read"));
  for (size_t i = 0; i < text.size(); ++i) {
    if (quoted && text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      quoted = !quoted;
      out += quoted ? "\"..." : "\"";
    } else if (!quoted) {
      out += text[i];
    }
  }
  return out;
}

void RequestLog::line(const OrderedJson& fields) const {
  if (!write_) return;
  if (!as_json_) return write_(plain_text(fields));
  OrderedJson line = {{"time", unix_seconds()}};
  line.update(fields);
  write_(dump(line));
}

void RequestLog::remember(OrderedJson request) {
  const std::lock_guard lock(mutex_);
  recent_.push_front(std::move(request));
  if (recent_.size() > kRecent) recent_.pop_back();
}

OrderedJson RequestLog::recent() const {
  const std::lock_guard lock(mutex_);
  return recent_;
}

void RequestLog::count_reply(const std::string& path, int status) {
  const std::lock_guard lock(mutex_);
  ++replies_[{path, status}];
}

std::map<std::pair<std::string, int>, int64_t> RequestLog::replies() const {
  const std::lock_guard lock(mutex_);
  return replies_;
}

}  // namespace pagedkv::server
