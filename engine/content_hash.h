// What a model's file holds, as a key: another file of one byte's difference is another model for a tier.
#pragma once

#include <atomic>
#include <optional>
#include <string>

#include "pagedkv/prefix.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

// What the memo has of the file as it is now: see below.
std::optional<PrefixKey> known_content_hash(const std::string& path, const std::string& memo);

// SHA-256 of the whole file. `memo` is a file that keeps such keys by device, inode, size and times of change, so
// that a file that has not changed is read once; empty: none. A memo that cannot be read or written is done
// without. Errors: kNotFound, kUnavailable (the system's word, or `stop` was set).
Result<PrefixKey> content_hash(const std::string& path, const std::string& memo, const std::atomic<bool>& stop);

}  // namespace pagedkv::engine
