#include "store/arena.h"

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "pagedkv/log.h"
#include "pagedkv/machine.h"

namespace pagedkv {

Result<std::unique_ptr<Arena>> Arena::create(ImageLayout layout, int64_t min_blocks, int64_t max_blocks,
                                             MemoryBudget& budget) {
  std::unique_ptr<Arena> arena(new Arena(std::move(layout), budget));
  const int64_t asked = max_blocks;
  for (;; max_blocks = std::max(min_blocks, max_blocks / 2)) {
    Status refused;
    arena->regions_.clear();
    for (const RegionSpec& spec : arena->layout_.regions) {
      auto range = AddressRange::reserve(spec.block_bytes * max_blocks);
      if (!range.ok()) {
        refused = range.status();
        break;
      }
      const int64_t granules = range->size() / spec.granule;
      arena->regions_.push_back({std::move(*range), spec, std::vector<uint8_t>(size_t(granules))});
    }
    if (refused.ok()) break;
    if (max_blocks == min_blocks) return refused;
  }
  arena->max_blocks_ = max_blocks;
  if (max_blocks < asked) {
    notice(str("[arena] address space for ", asked, " blocks was refused; the pool can grow to ", max_blocks));
  }
  return arena;
}

Arena::~Arena() { budget_.committed -= bytes_committed_; }

int64_t Arena::bytes_reserved() const {
  int64_t total = 0;
  for (const Region& region : regions_) total += region.range.size();
  return total;
}

int64_t Arena::blocks_left_by_budget() const {
  const int64_t left = std::max<int64_t>(0, budget_.limit - budget_.committed);
  if (committed_bytes(layout_, max_blocks_) - bytes_committed_ <= left) return max_blocks_;
  return left / layout_.extent_bytes * layout_.extent_blocks;
}

int64_t Arena::bytes_resident() const {
  int64_t total = 0;
  for (const Region& region : regions_) {
    const int64_t granules = int64_t(region.users.size());
    for (int64_t begin = 0; begin < granules; ++begin) {
      if (region.users[size_t(begin)] == 0) continue;
      int64_t end = begin;
      while (end < granules && region.users[size_t(end)] != 0) ++end;
      total += region.range.resident(begin * region.spec.granule, (end - begin) * region.spec.granule);
      begin = end;
    }
  }
  return total;
}

Arena::Granules Arena::granules_of(const Region& region, int64_t extent) const {
  const int64_t first = extent * layout_.extent_blocks;
  const int64_t last = std::min(first + layout_.extent_blocks, max_blocks_);
  const int64_t granule = region.spec.granule;
  return {first * region.spec.block_bytes / granule, (last * region.spec.block_bytes + granule - 1) / granule};
}

Status Arena::commit(int64_t index) {
  int64_t cost = 0;
  for (const Region& region : regions_) {
    const Granules span = granules_of(region, index);
    for (int64_t g = span.begin; g < span.end; ++g) cost += region.users[size_t(g)] == 0 ? region.spec.granule : 0;
  }
  if (budget_.committed + cost > budget_.limit) {
    return Status(Code::kCapacity, str("kv_memory ", bytes_text(budget_.limit),
                                       " is used up: ", bytes_text(budget_.committed), " are committed"));
  }
  if (const int64_t room = cgroup_room(); cost > room) {
    return Status(Code::kNoMemory,
                  str("the cgroup leaves ", bytes_text(room), ", an extent takes ", bytes_text(cost)));
  }

  // Granules that no extent uses yet, run by run; undone from the start if the system refuses one.
  Status refused;
  size_t reached = 0;
  for (; reached < regions_.size() && refused.ok(); ++reached) {
    Region& region = regions_[reached];
    Granules span = granules_of(region, index);
    while (span.begin < span.end && region.users[size_t(span.begin)] != 0) ++span.begin;
    while (span.end > span.begin && region.users[size_t(span.end - 1)] != 0) --span.end;
    if (span.begin == span.end) continue;
    refused = region.range.commit(span.begin * region.spec.granule, (span.end - span.begin) * region.spec.granule);
  }
  if (!refused.ok()) {
    for (size_t r = 0; r + 1 < reached; ++r) {
      Region& region = regions_[r];
      const Granules span = granules_of(region, index);
      for (int64_t g = span.begin; g < span.end; ++g)
        if (region.users[size_t(g)] == 0) region.range.decommit(g * region.spec.granule, region.spec.granule);
    }
    return refused;
  }
  for (Region& region : regions_) {
    const Granules span = granules_of(region, index);
    for (int64_t g = span.begin; g < span.end; ++g) ++region.users[size_t(g)];
  }
  bytes_committed_ += cost;
  budget_.committed += cost;
  return Status();
}

void Arena::decommit(int64_t index) {
  for (Region& region : regions_) {
    const Granules span = granules_of(region, index);
    for (int64_t g = span.begin; g < span.end; ++g) {
      if (--region.users[size_t(g)] != 0) continue;
      region.range.decommit(g * region.spec.granule, region.spec.granule);
      bytes_committed_ -= region.spec.granule;
      budget_.committed -= region.spec.granule;
    }
  }
}

void Arena::copy(uint32_t source, uint32_t destination) {
  for (const Region& region : regions_) {
    const int64_t bytes = region.spec.block_bytes;
    std::memcpy(region.range.data() + bytes * int64_t(destination), region.range.data() + bytes * int64_t(source),
                size_t(bytes));
  }
}

void Arena::read_image(uint32_t block, std::span<std::byte> image) const {
  size_t at = 0;
  for (const Region& region : regions_) {
    const auto bytes = size_t(region.spec.block_bytes);
    std::memcpy(image.data() + at, region.range.data() + bytes * block, bytes);
    at += bytes;
  }
}

void Arena::write_image(uint32_t block, std::span<const std::byte> image) {
  size_t at = 0;
  for (const Region& region : regions_) {
    const auto bytes = size_t(region.spec.block_bytes);
    std::memcpy(region.range.data() + bytes * block, image.data() + at, bytes);
    at += bytes;
  }
}

LayerTensors Arena::tensors(int layer_in_group, int64_t num_blocks) const {
  const LayerPlanes& planes = layout_.layers[size_t(layer_in_group)];
  const LayerShape& shape = layout_.shape;
  const auto view = [&](const Plane& plane, int64_t width, int64_t element_bytes) {
    return TensorView{address(plane),
                      element_bytes,
                      {num_blocks, layout_.block_size, shape.num_kv_heads, width},
                      {plane.block_stride, plane.slot_stride, plane.head_stride, element_bytes}};
  };
  const auto rows = [&](const Plane& plane, Format format, int64_t head_dim) {
    const int64_t bytes = row_bytes(format, head_dim).n;
    return is_quantized(format) ? view(plane, bytes, 1) : view(plane, head_dim, bytes / head_dim);
  };
  LayerTensors tensors;
  tensors.k = rows(planes.k, shape.formats.k, shape.head_dim_k);
  tensors.v = rows(planes.v, shape.formats.v, shape.head_dim_v);
  if (is_quantized(shape.formats.k)) tensors.k_scales = view(planes.k_scales, 1, 4);
  if (is_quantized(shape.formats.v)) tensors.v_scales = view(planes.v_scales, 1, 4);
  return tensors;
}

}  // namespace pagedkv
