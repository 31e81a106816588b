// Keys: SHA-256 chained over a prompt's blocks, so that a key names a block's content and all that came before.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "pagedkv/cache.h"

namespace pagedkv {

using Key = PrefixKey;

// Sixty-four of a key's bits: enough to place it in a table, never enough to trust.
inline uint64_t key_tag(const Key& key) {
  uint64_t tag;
  std::memcpy(&tag, key.bytes.data(), sizeof tag);
  return tag;
}

// The key above a prompt's first block: everything but tokens that makes K and V differ.
Key root_key(std::string_view fingerprint, std::string_view name_space);
// The key of a block with these token ids (full width) under `parent`. Fewer tokens than a block: a partial one.
Key chain_key(const Key& parent, std::span<const int32_t> tokens);

}  // namespace pagedkv
