// Counters of a cache: one schema from C++ to JSON and HTTP.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "pagedkv/export.h"

namespace pagedkv {

struct Stats {
  // Memory. Reserved is address space; committed is writable; resident is what the kernel has handed out.
  int64_t bytes_reserved = 0;
  int64_t bytes_committed = 0;
  int64_t bytes_resident = 0;
  int64_t bytes_in_use = 0;  // blocks held by sequences, padding included
  int64_t extent_bytes = 0;  // most that one growth step commits

  // Blocks of all groups. total = free + open + full + shared + cached.
  int64_t blocks_total = 0;
  int64_t blocks_free = 0;
  int64_t blocks_open = 0;       // one holder, no key
  int64_t blocks_full = 0;       // one holder, keyed
  int64_t blocks_shared = 0;     // two holders or more
  int64_t blocks_cached = 0;     // no holder, keyed: reusable, evicted when room is needed
  double block_utilization = 0;  // (total - free - cached) / total, 0 when there are none
  int64_t sequences = 0;
  int64_t tokens = 0;  // committed tokens of live sequences

  // Events since creation.
  int64_t alloc_events = 0;
  int64_t growth_events = 0;
  int64_t growth_bytes_copied = 0;  // always 0: growth maps memory, it never moves any
  int64_t shrink_events = 0;
  int64_t evictions = 0;
  int64_t copies = 0;             // copy-on-write orders carried out
  int64_t keyed_passed_over = 0;  // blocks that no tier heard of: CacheOptions::most_keyed were waiting
  int64_t quarantined_blocks = 0;

  // Kernels.
  int64_t dense_materializations = 0;            // dense K/V built for interoperability; attention never does
  int64_t dequantized_rows = 0;                  // rows decoded into such dense forms
  int64_t floor_clamped_rows = 0;                // rows whose scale met the 1e-6 floor
  int64_t saturated_values = 0;                  // finite values past the f16 range
  std::map<std::string, std::string> fallbacks;  // kernel -> reason
  std::map<std::string, int64_t> kernel_calls;   // path -> calls

  // Prefix reuse, in tokens.
  int64_t hit_tokens = 0;
  std::map<std::string, int64_t> hits_by_reason;  // "hit", and for tokens not reused, why (PrefixReason)
};

PKV_API std::string to_json(const Stats& stats);

}  // namespace pagedkv
