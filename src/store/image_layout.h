// Where every row and scale of a block lies, in both arena orders.
#pragma once

#include <cstdint>
#include <vector>

#include "pagedkv/layout.h"
#include "pagedkv/status.h"

namespace pagedkv {

inline constexpr int64_t kMaxBlockSize = 256;
inline constexpr int64_t kMaxHeads = 4096;
inline constexpr int64_t kPlaneAlign = 64;   // of every K, V and scale run inside an image
inline constexpr int64_t kImageAlign = 128;  // of the image itself

// Rows (or scales) of one layer. Row of (block, slot, head):
//   region base + offset + block * block_stride + slot * slot_stride + head * head_stride
struct Plane {
  int region = 0;
  int64_t offset = 0;
  int64_t block_stride = 0, slot_stride = 0, head_stride = 0;  // bytes
};

struct LayerPlanes {
  Plane k, v;
  Plane k_scales, v_scales;  // meaningful for quantized formats only
};

// One run of addresses that holds `block_bytes` of every block.
struct RegionSpec {
  int64_t block_bytes = 0;
  int64_t granule = 0;  // unit of commit: 2 MiB, or 4 KiB where an extent is smaller than that
};

struct ImageLayout {
  ArenaOrder order = ArenaOrder::kBlockMajor;
  LayerShape shape;
  int64_t block_size = 0;
  int64_t image_bytes = 0;    // of one block over all regions, padding included
  int64_t extent_blocks = 0;  // blocks that are committed and given back together
  int64_t extent_bytes = 0;   // most that committing one extent takes
  std::vector<RegionSpec> regions;
  std::vector<LayerPlanes> layers;  // in group order
};

// Bytes that the first n_blocks take once all of them have memory: whole granules of each region.
int64_t committed_bytes(const ImageLayout& layout, int64_t n_blocks);
// The most blocks, up to kMaxBlocks, whose committed_bytes() are within `bytes`.
int64_t blocks_within(const ImageLayout& layout, int64_t bytes);

// Errors: kInvalidArgument naming the value and its limit.
Result<ImageLayout> plan_image(const GroupSpec& group, int64_t block_size, ArenaOrder order);

}  // namespace pagedkv
