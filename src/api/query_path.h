// Which products attention takes over a group's codes.
#pragma once

#include "kernels/kernels.h"
#include "pagedkv/attention.h"
#include "pagedkv/layout.h"

namespace pagedkv {

struct ProductPaths {
  bool k_codes = false, v_codes = false;
};

// q_heads_per_kv_head: 0: not known.
ProductPaths choose_paths(QueryPath asked, const KvQuantConfig& formats, int64_t q_heads_per_kv_head,
                          const kernels::Entry& entry);

}  // namespace pagedkv
