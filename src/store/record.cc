#include "store/record.h"

#include <bit>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace pagedkv {
namespace {

static_assert(std::endian::native == std::endian::little, "records are little-endian");

constexpr uint32_t kMagic = 0x42564b50;  // "PKVB"
constexpr uint32_t kVersion = 1;
constexpr int64_t kLastSecond = int64_t{1} << 40;  // far off, and in microseconds still a number

struct Header {
  uint32_t magic, version, header_bytes, n_tokens;
  uint64_t image_bytes;
  int64_t created, expires;
  uint32_t group, depth;
  uint8_t key[32], parent[32], descriptor[32];
  XXH128_canonical_t content;  // of token ids and image
  uint8_t zeros[24];
  uint64_t check;  // XXH3-64 of all before it
};
static_assert(sizeof(Header) == kRecordHeader && alignof(Header) == 8);

XXH128_canonical_t content_of(std::span<const std::byte> tokens, std::span<const std::byte> image) {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  XXH3_128bits_update(&state, tokens.data(), tokens.size());
  XXH3_128bits_update(&state, image.data(), image.size());
  XXH128_canonical_t out;
  XXH128_canonicalFromHash(&out, XXH3_128bits_digest(&state));
  return out;
}

uint64_t check_of(const Header& header) { return XXH3_64bits(&header, offsetof(Header, check)); }

std::optional<Header> read(std::span<const std::byte> bytes) {
  if (std::ssize(bytes) < kRecordHeader) return std::nullopt;
  Header header;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != kMagic || header.version != kVersion || header.header_bytes != kRecordHeader ||
      header.check != check_of(header))
    return std::nullopt;
  return header;
}

bool is_key(const uint8_t (&bytes)[32], const PrefixKey& key) {
  return std::memcmp(bytes, key.bytes.data(), sizeof bytes) == 0;
}

}  // namespace

const char* tier_outcome_name(TierOutcome outcome) {
  constexpr const char* kNames[kTierOutcomes] = {"done", "missing", "refused", "late", "no_room", "down", "orphan"};
  return kNames[int(outcome)];
}

RecordHeader encode_header(const TierBlock& block, std::span<const std::byte> image, int64_t created,
                           int64_t expires) {
  Header header{};
  header.magic = kMagic;
  header.version = kVersion;
  header.header_bytes = kRecordHeader;
  header.n_tokens = uint32_t(block.tokens.size());
  header.image_bytes = image.size();
  header.created = created;
  header.expires = expires;
  header.group = block.group;
  header.depth = block.depth;
  std::memcpy(header.key, block.key.bytes.data(), sizeof header.key);
  std::memcpy(header.parent, block.parent.bytes.data(), sizeof header.parent);
  std::memcpy(header.descriptor, block.descriptor.bytes.data(), sizeof header.descriptor);
  header.content = content_of(std::as_bytes(block.tokens), image);
  header.check = check_of(header);
  return std::bit_cast<RecordHeader>(header);
}

std::optional<RecordFacts> decode_header(std::span<const std::byte> bytes) {
  const auto header = read(bytes);
  if (!header || header->image_bytes > uint64_t(INT64_MAX) / 2) return std::nullopt;
  if (header->created < 0 || header->created > kLastSecond || header->expires < 0) return std::nullopt;
  RecordFacts facts{.group = header->group,
                    .depth = header->depth,
                    .n_tokens = header->n_tokens,
                    .image_bytes = int64_t(header->image_bytes),
                    .created = header->created,
                    .expires = header->expires};
  std::memcpy(facts.key.bytes.data(), header->key, sizeof header->key);
  std::memcpy(facts.parent.bytes.data(), header->parent, sizeof header->parent);
  std::memcpy(facts.descriptor.bytes.data(), header->descriptor, sizeof header->descriptor);
  return facts;
}

bool is_record_of(std::span<const std::byte> record, const TierBlock& block, int64_t image_bytes) {
  const auto header = read(record);
  const int64_t n_tokens = std::ssize(block.tokens);
  if (!header || header->n_tokens != uint64_t(n_tokens) || header->image_bytes != uint64_t(image_bytes) ||
      std::ssize(record) < record_bytes(n_tokens, image_bytes))
    return false;
  if (!is_key(header->key, block.key) || !is_key(header->parent, block.parent) ||
      !is_key(header->descriptor, block.descriptor) || header->group != block.group || header->depth != block.depth)
    return false;
  const auto tokens = record.subspan(kRecordHeader, size_t(n_tokens) * sizeof(int32_t));
  const auto image = record.subspan(kRecordHeader + tokens.size(), size_t(image_bytes));
  if (!block.tokens.empty() && std::memcmp(tokens.data(), block.tokens.data(), tokens.size()) != 0) return false;
  const XXH128_canonical_t content = content_of(tokens, image);
  return std::memcmp(&content, &header->content, sizeof content) == 0;
}

}  // namespace pagedkv
