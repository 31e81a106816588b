#include "store/mover.h"

namespace pagedkv {

void Mover::carry_out(const Orders& orders) {
  for (const CopyOrder& copy : orders.copies)
    arenas_[size_t(copy.group)]->copy(uint32_t(copy.source), uint32_t(copy.destination));
}

}  // namespace pagedkv
