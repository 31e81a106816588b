// Blocks as they are now, to be drawn or looked at.
#pragma once

#include <cstdint>
#include <vector>

namespace pagedkv {

enum class BlockState : uint8_t { kAbsent, kFree, kOpen, kFull, kShared, kCached };

struct BlockView {
  BlockState state = BlockState::kAbsent;  // kAbsent: no memory behind it
  uint32_t holders = 0;
  int64_t last_step = 0;  // the last step in which it was taken, held or given back
  int64_t sequence = -1;  // index of one of its holders (SequenceId::index), -1: none
  uint64_t key = 0;       // the first bytes of its key; 0: none
};

// Every block of a group, by id.
struct BlockViews {
  std::vector<BlockView> blocks;
  int64_t step = 0;  // the last one, to which BlockView::last_step relates
};

}  // namespace pagedkv
