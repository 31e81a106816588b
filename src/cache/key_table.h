// A hash table from keys to small integers that stores no keys: whoever owns them compares.
#pragma once

#include <cstdint>
#include <vector>

#include "base/hash.h"

namespace pagedkv {

// Open addressing with linear probing; erasing closes the gap, so lookups never meet tombstones. One thread.
class KeyTable {
 public:
  static constexpr uint32_t kNone = 0xffffffffu;

  // The value whose key `same(value)` confirms, or kNone.
  template <class Same>
  uint32_t find(const Key& key, const Same& same) const {
    if (slots_.empty()) return kNone;
    const uint64_t tag = key_tag(key);
    for (size_t at = tag & mask();; at = (at + 1) & mask()) {
      const Slot& slot = slots_[at];
      if (slot.value == kNone) return kNone;
      if (slot.tag == tag && same(slot.value)) return slot.value;
    }
  }

  // Requires: the key is not there.
  void insert(const Key& key, uint32_t value) {
    if ((size_ + 1) * 2 > slots_.size()) grow();
    place({key_tag(key), value});
    ++size_;
  }

  // Replaces the value of a key that is there.
  void replace(const Key& key, uint32_t old_value, uint32_t new_value) {
    slots_[locate(key, old_value)].value = new_value;
  }

  // Requires: the pair is there.
  void erase(const Key& key, uint32_t value) {
    size_t gap = locate(key, value);
    for (size_t at = (gap + 1) & mask(); slots_[at].value != kNone; at = (at + 1) & mask()) {
      const size_t home = slots_[at].tag & mask();
      if (((at - home) & mask()) >= ((at - gap) & mask())) {  // its probe passes the gap: move it there
        slots_[gap] = slots_[at];
        gap = at;
      }
    }
    slots_[gap].value = kNone;
    --size_;
  }

  size_t size() const { return size_; }

 private:
  struct Slot {
    uint64_t tag = 0;
    uint32_t value = kNone;
  };

  size_t mask() const { return slots_.size() - 1; }
  size_t locate(const Key& key, uint32_t value) const {
    size_t at = key_tag(key) & mask();
    while (slots_[at].value != value || slots_[at].tag != key_tag(key)) at = (at + 1) & mask();
    return at;
  }
  void place(const Slot& slot) {
    size_t at = slot.tag & mask();
    while (slots_[at].value != kNone) at = (at + 1) & mask();
    slots_[at] = slot;
  }
  void grow() {
    std::vector<Slot> old(slots_.empty() ? 64 : slots_.size() * 2);
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.value != kNone) place(slot);
  }

  std::vector<Slot> slots_;
  size_t size_ = 0;
};

}  // namespace pagedkv
