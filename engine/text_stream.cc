// UTF-8 and the stream of text that is safe to show. No libllama here.
#include <algorithm>
#include <utility>

#include "engine/text.h"

namespace pagedkv::engine {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

enum class Utf8 { kValid, kInvalid, kIncomplete };

// What `text` begins with (Unicode 15, table 3-7): a character, a run that is none and never will be, or the
// beginning of a character that the end of the text cuts off. Requires: text is not empty.
struct Utf8Start {
  Utf8 kind;
  size_t size;  // bytes; of a kInvalid run the part that one U+FFFD stands for
};

Utf8Start utf8_start(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return {Utf8::kValid, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8::kInvalid, 1};
  const size_t size = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  for (size_t i = 1; i < size; ++i) {
    if (i == text.size()) return {Utf8::kIncomplete, i};
    // The second byte's range rules out overlong forms, surrogates and what lies past U+10FFFF.
    const unsigned char low = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned char high = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte(i) < low || byte(i) > high) return {Utf8::kInvalid, i};
  }
  return {Utf8::kValid, size};
}

// Moves whole characters from the front of `text` to the result. With `all`, an incomplete one at the end becomes
// U+FFFD; without, it stays and `text` is left with it.
std::string take_characters(std::string_view& text, bool all) {
  std::string shown;
  while (!text.empty()) {
    const auto [kind, size] = utf8_start(text);
    if (kind == Utf8::kIncomplete && !all) break;
    shown += kind == Utf8::kValid ? text.substr(0, size) : kReplacement;
    text.remove_prefix(size);
  }
  return shown;
}

// Bytes at the end of `text` that are a proper beginning of `stop`.
size_t begun(std::string_view text, std::string_view stop) {
  for (size_t n = std::min(text.size(), stop.size() - 1); n > 0; --n)
    if (text.ends_with(stop.substr(0, n))) return n;
  return 0;
}

}  // namespace

int64_t find_invalid_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const auto [kind, size] = utf8_start(text.substr(at));
    if (kind != Utf8::kValid) return int64_t(at);
    at += size;
  }
  return -1;
}

TextStream::TextStream(std::vector<std::string> stop_strings) : stop_strings_(std::move(stop_strings)) {
  std::erase(stop_strings_, "");
}

std::string TextStream::push(std::string_view piece) {
  if (stopped_) return "";
  held_ += piece;

  // The stop string whose last byte comes first has won, whatever pieces the bytes arrived in; of several that
  // end there, the longest. A match never began in text that is already out: its beginning was held back.
  size_t stop_begin = std::string::npos, stop_end = std::string::npos;
  size_t keep = 0;
  for (const std::string& stop : stop_strings_) {
    if (const size_t at = held_.find(stop); at != std::string::npos) {
      const size_t end = at + stop.size();
      if (end < stop_end || (end == stop_end && at < stop_begin)) stop_begin = at, stop_end = end;
    } else {
      keep = std::max(keep, begun(held_, stop));
    }
  }
  if (stop_end != std::string::npos) {
    stopped_ = true;
    std::string_view before = std::string_view(held_).substr(0, stop_begin);
    std::string shown = take_characters(before, true);
    held_.clear();
    return shown;
  }

  std::string_view ready = std::string_view(held_).substr(0, held_.size() - keep);
  const size_t offered = ready.size();
  std::string shown = take_characters(ready, false);
  held_.erase(0, offered - ready.size());
  return shown;
}

std::string TextStream::finish() {
  std::string_view rest = held_;
  std::string shown = take_characters(rest, true);
  held_.clear();
  return shown;
}

}  // namespace pagedkv::engine
