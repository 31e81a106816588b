// Host memory: address space that is reserved once and made writable in pieces.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pagedkv/status.h"

namespace pagedkv {

inline constexpr int64_t kHugePage = int64_t{2} << 20;
inline constexpr int64_t kSmallPage = int64_t{4} << 10;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// A run of addresses without memory behind it, aligned for 2 MiB pages. One thread.
class AddressRange {
 public:
  AddressRange() = default;
  // Errors: kNoMemory with the size and the system's reason.
  static Result<AddressRange> reserve(int64_t bytes);
  ~AddressRange();
  AddressRange(AddressRange&& other) noexcept;
  AddressRange& operator=(AddressRange&& other) noexcept;

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }

  // Makes [offset, offset + bytes) readable and writable, zero-filled, on huge pages where they fit. Page
  // multiples. Errors: kNoMemory; nothing changed.
  Status commit(int64_t offset, int64_t bytes);
  // Gives the memory back; the addresses stay reserved. Page multiples.
  void decommit(int64_t offset, int64_t bytes);
  // Bytes of [offset, offset + bytes) that have memory behind them.
  int64_t resident(int64_t offset, int64_t bytes) const;

 private:
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
  void* mapping_ = nullptr;  // what mmap gave; data_ is its first 2 MiB boundary
  int64_t mapping_size_ = 0;
};

}  // namespace pagedkv
