// Where images lie: preallocated files ("chunks") of slots of one size each. Nothing is moved: a slot is written
// over when its block has made room, and a size that is wanted no more gives its chunk away whole.
//
//   DIR/chunks/000012.196608      chunk 12, slots of 196,608 bytes
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "pagedkv/status.h"
#include "store/disk/files.h"

namespace pagedkv {

struct SlotPlace {
  int64_t chunk = 0, slot = 0;
  auto operator<=>(const SlotPlace&) const = default;
};

// A slot that is held: its file stays open and its bytes are nobody else's, so no lock is needed to transfer them.
struct HeldSlot {
  SlotPlace place{};
  int file = -1, direct = -1;  // direct: past the page cache, -1 where the file system cannot
  int64_t offset = 0, bytes = 0;
};

// One thread at a time.
class Chunks {
 public:
  static constexpr int64_t kPage = 4096;  // slots begin and end at pages, as O_DIRECT asks

  Chunks(Files& files, std::string folder) : files_(files), folder_(std::move(folder)) {}
  ~Chunks();
  Chunks(const Chunks&) = delete;
  Chunks& operator=(const Chunks&) = delete;

  // Opens the files that are there; what is no chunk, or shorter than a slot, is deleted.
  Status open();

  // A new chunk of about `bytes`, at least one slot. Errors: kCapacity on a full disk, else kUnavailable.
  Status add(int64_t slot_bytes, int64_t bytes);
  // Deletes its file. Requires: no slot of it is held.
  void drop(int64_t chunk);

  // Of this size, neither taken nor held; nothing if there is none.
  std::optional<SlotPlace> find_free(int64_t slot_bytes) const;
  // False: there is no such slot, or it is taken.
  bool take(SlotPlace place);
  void give(SlotPlace place);
  bool is_any_held() const;
  void give_all();  // no slot is taken
  bool is_held(int64_t chunk) const { return chunks_.at(chunk).n_held > 0; }
  // `writes`: the chunk is to be synced.
  HeldSlot hold(SlotPlace place, bool writes);
  void let_go(SlotPlace place);
  // A slot of each chunk that was written since the last call, held.
  std::vector<HeldSlot> hold_written();

  std::vector<int64_t> numbers() const;
  bool has(SlotPlace place) const;
  int64_t slot_bytes(int64_t chunk) const { return chunks_.at(chunk).slot_bytes; }
  int64_t n_slots(int64_t chunk) const { return chunks_.at(chunk).n_slots; }
  bool has_other_size(int64_t slot_bytes) const;
  int64_t bytes() const { return bytes_; }  // of all files
  int64_t slots() const { return slots_; }

 private:
  struct Chunk {
    int64_t slot_bytes = 0, n_slots = 0, n_free = 0, n_held = 0;
    int file = -1, direct = -1;
    bool written = false;
    std::vector<uint8_t> taken;  // [n_slots]
    std::vector<uint16_t> held;  // [n_slots] how often
  };
  std::string path_of(int64_t number, int64_t slot_bytes) const;
  void keep(int64_t number, int64_t slot_bytes, int64_t n_slots, int file);

  Files& files_;
  std::string folder_;
  std::map<int64_t, Chunk> chunks_;
  int64_t next_ = 0, bytes_ = 0, slots_ = 0;
};

}  // namespace pagedkv
