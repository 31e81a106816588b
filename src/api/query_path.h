// Which products attention takes over a group's codes.
#pragma once

#include "kernels/kernels.h"
#include "pagedkv/attention.h"
#include "pagedkv/layout.h"

namespace pagedkv {

struct ProductPaths {
  bool k_codes = false, v_codes = false;
};

ProductPaths choose_paths(QueryPath asked, const GroupSpec& group, const kernels::Entry& entry);

}  // namespace pagedkv
