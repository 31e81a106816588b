// Keys: SHA-256 chained over a prompt's blocks, so that a key names a block's content and all that came before.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "pagedkv/prefix.h"

namespace pagedkv {

using Key = PrefixKey;

// Sixty-four of a key's bits: enough to place it in a table, never enough to trust.
inline uint64_t key_tag(const Key& key) {
  uint64_t tag;
  std::memcpy(&tag, key.bytes.data(), sizeof tag);
  return tag;
}

Key sha256(std::string_view bytes);
// The key above a prompt's first block: HMAC-SHA-256 of the cache's descriptor under the salt, so that who does not
// know the salt cannot make its keys. Salts that differ, if only by zeros at their end, are different.
Key root_key(const Key& descriptor, std::string_view salt);
// The key of a block with these token ids (full width) under `parent`. Fewer tokens than a block: a partial one.
Key chain_key(const Key& parent, std::span<const int32_t> tokens);

}  // namespace pagedkv
