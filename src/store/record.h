// A stored block as bytes: what every tier writes, and the one check of what comes back.
//
//   header (192 bytes) | token ids (int32) | image        all little-endian; docs/formats.md lists the fields
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "pagedkv/tier.h"

namespace pagedkv {

inline constexpr int64_t kRecordHeader = 192;
using RecordHeader = std::array<std::byte, kRecordHeader>;

constexpr int64_t record_bytes(int64_t n_tokens, int64_t image_bytes) {
  return kRecordHeader + n_tokens * int64_t(sizeof(int32_t)) + image_bytes;
}

// `created` and `expires` (0: never): seconds since 1970.
RecordHeader encode_header(const TierBlock& block, std::span<const std::byte> image, int64_t created,
                           int64_t expires);

// What a header says of itself, for who finds a record without knowing what it is.
struct RecordFacts {
  PrefixKey key{}, parent{}, descriptor{};
  uint32_t group = 0, depth = 0;
  int64_t n_tokens = 0, image_bytes = 0, created = 0, expires = 0;
};
// Nothing if it is no header, is damaged, or of another version.
std::optional<RecordFacts> decode_header(std::span<const std::byte> header);

// Whether the record is the block's, whole and undamaged: `record` holds header, tokens and image of `image_bytes`.
bool is_record_of(std::span<const std::byte> record, const TierBlock& block, int64_t image_bytes);

}  // namespace pagedkv
