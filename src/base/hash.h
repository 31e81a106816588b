// Keys: SHA-256 chained over a prompt's blocks, so that a key names a block's content and all that came before.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace pagedkv {

struct Key {
  std::array<uint8_t, 32> bytes{};
  bool operator==(const Key&) const = default;
  // Sixty-four of its bits: enough to place it in a table, never enough to trust.
  uint64_t tag() const {
    uint64_t tag;
    std::memcpy(&tag, bytes.data(), sizeof tag);
    return tag;
  }
};

// The key above a prompt's first block: everything but tokens that makes K and V differ.
Key root_key(std::string_view fingerprint, std::string_view name_space);
// The key of a block with these token ids (full width) under `parent`. Fewer tokens than a block: a partial one.
Key chain_key(const Key& parent, std::span<const int32_t> tokens);

}  // namespace pagedkv
