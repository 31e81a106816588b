// Carries out what the cache has decided: moves images between blocks.
#pragma once

#include <vector>

#include "base/orders.h"
#include "store/arena.h"

namespace pagedkv {

// One thread: the one that changes the cache.
class Mover {
 public:
  // `arenas`: of each group; they must outlive the mover.
  explicit Mover(std::vector<Arena*> arenas) : arenas_(std::move(arenas)) {}

  // All orders, in their order. Requires: the blocks have memory.
  void carry_out(const Orders& orders);

 private:
  std::vector<Arena*> arenas_;
};

}  // namespace pagedkv
