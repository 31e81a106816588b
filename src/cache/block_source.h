// Memory for extents of blocks, as the cache asks for it: the one thing that deciding has to wait for, because it
// may be refused. All else is an order (base/orders.h).
#pragma once

#include <cstdint>

#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

class BlockSource {
 public:
  virtual ~BlockSource() = default;
  // Makes the blocks of an extent usable. Errors: kCapacity, kNoMemory; nothing changed.
  virtual Status commit(int64_t extent) = 0;
  virtual void decommit(int64_t extent) = 0;
  // Committed bytes of this source, and blocks that could still be committed: never more than commit would give.
  virtual int64_t bytes_committed() const = 0;
  virtual int64_t blocks_left_by_budget() const = 0;
};

}  // namespace pagedkv
