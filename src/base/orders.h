// What the cache decides and the store carries out: data, so that deciding never waits for memory, disk or device.
#pragma once

#include <vector>

#include "pagedkv/units.h"

namespace pagedkv {

// A block's image goes to another block of its group.
struct CopyOrder {
  int group = 0;
  BlockId source{}, destination{};
};

// To be carried out in this order before anything is written or read by the plan that they come with: a block may
// be the destination of one order after it was the source of another.
struct Orders {
  std::vector<CopyOrder> copies;

  void clear() { copies.clear(); }
};

}  // namespace pagedkv
