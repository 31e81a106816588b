#include "store/disk/chunks.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>

#include "base/check.h"
#include "base/text.h"

namespace pagedkv {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostSlotBytes = int64_t{1} << 40;

std::optional<int64_t> whole_number(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size() || value < 0) return std::nullopt;
  return value;
}

struct Name {
  int64_t number, slot_bytes;
};

std::optional<Name> read_name(const std::string& name) {
  const size_t dot = name.find('.');
  if (dot == std::string::npos) return std::nullopt;
  const auto number = whole_number(std::string_view(name).substr(0, dot));
  const auto size = whole_number(std::string_view(name).substr(dot + 1));
  if (!number || !size || *size == 0 || *size > kMostSlotBytes || *size % Chunks::kPage != 0) return std::nullopt;
  return Name{*number, *size};
}

}  // namespace

Chunks::~Chunks() {
  for (auto& [number, chunk] : chunks_) {
    files_.close(chunk.file);
    if (chunk.direct >= 0) files_.close(chunk.direct);
  }
}

std::string Chunks::path_of(int64_t number, int64_t slot_bytes) const {
  std::string digits = str(number);
  digits.insert(0, std::string(size_t(std::max<int64_t>(0, 6 - std::ssize(digits))), '0'));
  return str(folder_, "/", digits, ".", slot_bytes);
}

void Chunks::keep(int64_t number, int64_t slot_bytes, int64_t n_slots, int file) {
  Chunk chunk{.slot_bytes = slot_bytes, .n_slots = n_slots, .n_free = n_slots, .file = file};
  chunk.direct = files_.open(path_of(number, slot_bytes), O_RDONLY | O_DIRECT, 0);
  chunk.taken.resize(size_t(n_slots));
  chunk.held.resize(size_t(n_slots));
  chunks_.emplace(number, std::move(chunk));
  next_ = std::max(next_, number + 1);
  bytes_ += n_slots * slot_bytes;
  slots_ += n_slots;
}

Status Chunks::open() {
  std::error_code error;
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder_, error)) names.push_back(entry.path().filename());
  if (error) return Status(Code::kUnavailable, str("[disk] ", folder_, " cannot be listed: ", error.message()));
  std::ranges::sort(names);
  for (const std::string& name : names) {
    const std::string path = folder_ + "/" + name;
    const auto known = read_name(name);
    const int file = known && !chunks_.contains(known->number) ? files_.open(path, O_RDWR, 0) : -ENOENT;
    if (file < 0 && file != -ENOENT)
      return Status(Code::kUnavailable, str("[disk] ", path, " cannot be opened: ", std::strerror(-file)));
    // A file that was cut off holds whole slots up to there; the images of the others are misses.
    const int64_t n_slots = file >= 0 ? files_.length(file) / known->slot_bytes : 0;
    if (n_slots > 0) {
      keep(known->number, known->slot_bytes, n_slots, file);
    } else {
      if (file >= 0) files_.close(file);
      files_.unlink(path);
    }
  }
  return Status();
}

Status Chunks::add(int64_t slot_bytes, int64_t bytes) {
  const int64_t n_slots = std::max<int64_t>(1, bytes / slot_bytes);
  const std::string path = path_of(next_, slot_bytes);
  const int file = files_.open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
  if (file == -ENOSPC || file == -EDQUOT)
    return Status(Code::kCapacity, str("[disk] ", path, ": the disk is full"));
  if (file < 0) return Status(Code::kUnavailable, str("[disk] ", path, " cannot be made: ", std::strerror(-file)));
  if (const int error = -files_.allocate(file, n_slots * slot_bytes); error != 0) {
    files_.close(file);
    files_.unlink(path);
    const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    return Status(full ? Code::kCapacity : Code::kUnavailable,
                  str("[disk] ", path, ": no room for ", n_slots * slot_bytes, " bytes: ", std::strerror(error)));
  }
  keep(next_, slot_bytes, n_slots, file);
  return Status();
}

void Chunks::drop(int64_t number) {
  const auto found = chunks_.find(number);
  PKV_CHECK(found != chunks_.end() && found->second.n_held == 0);
  Chunk& chunk = found->second;
  files_.close(chunk.file);
  if (chunk.direct >= 0) files_.close(chunk.direct);
  files_.unlink(path_of(number, chunk.slot_bytes));
  bytes_ -= chunk.n_slots * chunk.slot_bytes;
  slots_ -= chunk.n_slots;
  chunks_.erase(found);
}

std::optional<SlotPlace> Chunks::find_free(int64_t slot_bytes) const {
  for (const auto& [number, chunk] : chunks_) {
    if (chunk.slot_bytes != slot_bytes || chunk.n_free == 0) continue;
    for (int64_t slot = 0; slot < chunk.n_slots; ++slot)
      if (chunk.taken[size_t(slot)] == 0 && chunk.held[size_t(slot)] == 0) return SlotPlace{number, slot};
  }
  return std::nullopt;
}

bool Chunks::has(SlotPlace place) const {
  const auto found = chunks_.find(place.chunk);
  return found != chunks_.end() && place.slot >= 0 && place.slot < found->second.n_slots;
}

bool Chunks::take(SlotPlace place) {
  if (!has(place)) return false;
  Chunk& chunk = chunks_.at(place.chunk);
  if (chunk.taken[size_t(place.slot)] != 0) return false;
  chunk.taken[size_t(place.slot)] = 1;
  --chunk.n_free;
  return true;
}

void Chunks::give(SlotPlace place) {
  Chunk& chunk = chunks_.at(place.chunk);
  PKV_CHECK(chunk.taken[size_t(place.slot)] != 0);
  chunk.taken[size_t(place.slot)] = 0;
  ++chunk.n_free;
}

bool Chunks::is_any_held() const {
  return std::ranges::any_of(chunks_, [](const auto& one) { return one.second.n_held > 0; });
}

void Chunks::give_all() {
  for (auto& [number, chunk] : chunks_) {
    std::ranges::fill(chunk.taken, uint8_t{0});
    chunk.n_free = chunk.n_slots;
  }
}

HeldSlot Chunks::hold(SlotPlace place, bool writes) {
  Chunk& chunk = chunks_.at(place.chunk);
  ++chunk.held[size_t(place.slot)];
  ++chunk.n_held;
  chunk.written |= writes;
  return {place, chunk.file, chunk.direct, place.slot * chunk.slot_bytes, chunk.slot_bytes};
}

void Chunks::let_go(SlotPlace place) {
  Chunk& chunk = chunks_.at(place.chunk);
  --chunk.held[size_t(place.slot)];
  --chunk.n_held;
}

std::vector<HeldSlot> Chunks::hold_written() {
  std::vector<HeldSlot> out;
  for (auto& [number, chunk] : chunks_) {
    if (!chunk.written) continue;
    out.push_back(hold({number, 0}, false));
    chunk.written = false;
  }
  return out;
}

std::vector<int64_t> Chunks::numbers() const {
  std::vector<int64_t> out;
  for (const auto& [number, chunk] : chunks_) out.push_back(number);
  return out;
}

bool Chunks::has_other_size(int64_t slot_bytes) const {
  return std::ranges::any_of(chunks_, [&](const auto& one) { return one.second.slot_bytes != slot_bytes; });
}

}  // namespace pagedkv
