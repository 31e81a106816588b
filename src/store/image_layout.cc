#include "store/image_layout.h"

#include <algorithm>

#include "base/check.h"
#include "base/text.h"
#include "device/host_memory.h"

namespace pagedkv {
namespace {

constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxLayers = 4096;

Status check_range(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return Status();
  return invalid_argument(str("[cache] ", what, " is ", value, ", allowed are ", low, " to ", high));
}

Status check_group(const GroupSpec& group, int64_t block_size) {
  const LayerShape& shape = group.shape;
  for (const Status& status :
       {check_range("block_size", block_size, 1, kMaxBlockSize),
        check_range("num_kv_heads", shape.num_kv_heads, 1, kMaxHeads),
        check_range("head_dim of K", shape.head_dim_k, 1, kMaxHeadDim),
        check_range("head_dim of V", shape.head_dim_v, 1, kMaxHeadDim),
        check_range("number of layers in a group", int64_t(group.layers.size()), 1, kMaxLayers),
        check_range("sliding_window", group.sliding_window, 0, int64_t{1} << 31)}) {
    if (!status.ok()) return status;
  }
  if (Status status = check_head_dim(shape.formats.k, shape.head_dim_k); !status.ok()) return status;
  return check_head_dim(shape.formats.v, shape.head_dim_v);
}

// One image: layer after layer K rows, V rows, K scales, V scales; rows and scales head-major, so that the rows of
// one head are one stream for the prefetcher.
void place_block_major(const GroupSpec& group, ImageLayout& layout) {
  const LayerShape& shape = group.shape;
  int64_t at = 0;
  const auto place = [&](int64_t row) {
    Plane plane{0, at, 0, row, row * layout.block_size};
    at += round_up(row * layout.block_size * shape.num_kv_heads, kPlaneAlign);
    return plane;
  };
  for (size_t i = 0; i < group.layers.size(); ++i) {
    LayerPlanes planes;
    planes.k = place(row_bytes(shape.formats.k, shape.head_dim_k).n);
    planes.v = place(row_bytes(shape.formats.v, shape.head_dim_v).n);
    planes.k_scales = place(scale_bytes(shape.formats.k).n);
    planes.v_scales = place(scale_bytes(shape.formats.v).n);
    layout.layers.push_back(planes);
  }
  layout.image_bytes = round_up(at, kImageAlign);
  for (LayerPlanes& planes : layout.layers)
    for (Plane* plane : {&planes.k, &planes.v, &planes.k_scales, &planes.v_scales})
      plane->block_stride = layout.image_bytes;
  layout.regions = {{layout.image_bytes, kHugePage}};
  layout.extent_blocks = (kHugePage + layout.image_bytes - 1) / layout.image_bytes;
}

// One contiguous token-major tensor a region, without padding.
void place_layer_major(const GroupSpec& group, ImageLayout& layout) {
  const LayerShape& shape = group.shape;
  const auto place = [&](int64_t row) {
    const int64_t slot = row * shape.num_kv_heads;
    const int64_t block = slot * layout.block_size;
    if (row == 0) return Plane{};
    layout.regions.push_back({block, 0});
    layout.image_bytes += block;
    return Plane{int(layout.regions.size()) - 1, 0, block, slot, row};
  };
  const int64_t k_row = row_bytes(shape.formats.k, shape.head_dim_k).n;
  const int64_t v_row = row_bytes(shape.formats.v, shape.head_dim_v).n;
  for (size_t i = 0; i < group.layers.size(); ++i) {
    LayerPlanes planes;
    planes.k = place(k_row);
    planes.v = place(v_row);
    planes.k_scales = place(scale_bytes(shape.formats.k).n);
    planes.v_scales = place(scale_bytes(shape.formats.v).n);
    layout.layers.push_back(planes);
  }
  // An extent fills 2 MiB of every K and V region. Scale regions are 16-64 times thinner; filling 2 MiB of those
  // too would make an extent of hundreds of MiB, so they are committed by small pages.
  const int64_t thinnest = std::min(k_row, v_row) * shape.num_kv_heads * layout.block_size;
  PKV_CHECK(thinnest > 0);  // check_group() saw to it
  layout.extent_blocks = (kHugePage + thinnest - 1) / thinnest;
  for (RegionSpec& region : layout.regions)
    region.granule = region.block_bytes * layout.extent_blocks >= kHugePage ? kHugePage : kSmallPage;
}

}  // namespace

int64_t committed_bytes(const ImageLayout& layout, int64_t n_blocks) {
  int64_t total = 0;
  for (const RegionSpec& region : layout.regions) total += round_up(region.block_bytes * n_blocks, region.granule);
  return total;
}

int64_t blocks_within(const ImageLayout& layout, int64_t bytes) {
  int64_t least = 0, most = std::clamp<int64_t>(bytes / layout.image_bytes, 0, kMaxBlocks);
  while (least < most) {
    const int64_t middle = least + (most - least + 1) / 2;
    if (committed_bytes(layout, middle) <= bytes)
      least = middle;
    else
      most = middle - 1;
  }
  return least;
}

Result<ImageLayout> plan_image(const GroupSpec& group, int64_t block_size, ArenaOrder order) {
  if (Status status = check_group(group, block_size); !status.ok()) return status;
  ImageLayout layout;
  layout.order = order;
  layout.shape = group.shape;
  layout.block_size = block_size;
  if (order == ArenaOrder::kBlockMajor)
    place_block_major(group, layout);
  else
    place_layer_major(group, layout);
  for (const RegionSpec& region : layout.regions)
    layout.extent_bytes += round_up(region.block_bytes * layout.extent_blocks, region.granule);
  return layout;
}

}  // namespace pagedkv
