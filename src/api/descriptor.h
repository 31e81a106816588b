// All that makes a block's bytes, and what they mean, in one canonical record.
#pragma once

#include <span>
#include <string>

#include "api/query_path.h"
#include "base/hash.h"
#include "pagedkv/cache.h"

namespace pagedkv {

// The record: integers little-endian in 64 bits, texts with their length in front, no padding and no locale, so
// that two caches have equal records exactly when their blocks may be exchanged, on any machine. docs/formats.md
// lists the fields.
//   paths  [options.groups]
std::string describe(const CacheOptions& options, std::span<const ProductPaths> paths);

// SHA-256 of the record: above every key, and what a file or a store of blocks carries.
Key descriptor_of(const CacheOptions& options, std::span<const ProductPaths> paths);

}  // namespace pagedkv
