// The memory of one group's blocks: reserved once, committed and given back by extents, never moved.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/host_memory.h"
#include "pagedkv/layout.h"
#include "pagedkv/status.h"
#include "store/image_layout.h"

namespace pagedkv {

// Bytes that all arenas of a cache may commit together. One thread.
struct MemoryBudget {
  int64_t limit = 0;
  int64_t committed = 0;
};

// One thread, the one that changes the cache; addresses and tensors may be read by any.
class Arena {
 public:
  // Reserves addresses for max_blocks; if the system refuses, for half as many and so on, but never fewer than
  // min_blocks. `budget` must outlive the arena. Errors: kNoMemory.
  static Result<std::unique_ptr<Arena>> create(ImageLayout layout, int64_t min_blocks, int64_t max_blocks,
                                               MemoryBudget& budget);
  ~Arena();

  const ImageLayout& layout() const { return layout_; }
  int64_t max_blocks() const { return max_blocks_; }
  int64_t bytes_reserved() const;
  int64_t bytes_committed() const { return bytes_committed_; }
  int64_t bytes_resident() const;
  // Blocks without memory that the budget lets this arena commit, never too many: all up to max_blocks() where they
  // fit, else by whole extents.
  int64_t blocks_left_by_budget() const;

  // Makes the blocks of extent `index` usable. Checks the budget and what the cgroup leaves before it asks the
  // system. Errors: kCapacity (the budget), kNoMemory (the cgroup, the system); nothing changed.
  Status commit(int64_t index);
  // Gives the memory of a committed extent back. A page that a neighbour still uses stays.
  void decommit(int64_t index);

  // Copies one block's image.
  void copy(uint32_t source, uint32_t destination);

  // One block's image, region by region: layout().image_bytes. Any thread, while nobody else writes it.
  void read_image(uint32_t block, std::span<std::byte> image) const;
  void write_image(uint32_t block, std::span<const std::byte> image);

  std::byte* address(const Plane& plane) const {
    return regions_[size_t(plane.region)].range.data() + plane.offset;
  }
  LayerTensors tensors(int layer_in_group, int64_t num_blocks) const;

 private:
  struct Region {
    AddressRange range;
    RegionSpec spec;
    std::vector<uint8_t> users;  // per granule: committed extents that reach into it
  };
  struct Granules {
    int64_t begin, end;
  };

  Arena(ImageLayout layout, MemoryBudget& budget) : layout_(std::move(layout)), budget_(budget) {}
  Granules granules_of(const Region& region, int64_t extent) const;

  ImageLayout layout_;
  MemoryBudget& budget_;
  int64_t max_blocks_ = 0;
  int64_t bytes_committed_ = 0;
  std::vector<Region> regions_;
};

}  // namespace pagedkv
