// Cache::create: from options to a cache, in steps that each leave nothing behind when one fails.

#include <algorithm>
#include <limits>

#include "api/cache_impl.h"
#include "api/descriptor.h"
#include "api/isa.h"
#include "base/env.h"
#include "pagedkv/log.h"
#include "pagedkv/machine.h"

namespace pagedkv {

// A group's image, and how many blocks it has at least.
struct GroupDraft {
  ImageLayout layout;
  int64_t floor_blocks = 0;
  // What the floor takes: whole extents.
  int64_t floor_bytes() const { return committed_bytes(layout, round_up(floor_blocks, layout.extent_blocks)); }
};

namespace {

// The addresses that a process has on today's machines; sums of sizes below it stay far from 64 bits.
constexpr int64_t kMaxKvMemory = int64_t{1} << 47;

int64_t saturated_product(int64_t a, int64_t b) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return b > 0 && a > kMost / b ? kMost : a * b;
}

Status check_options(const CacheOptions& options) {
  if (options.groups.empty()) return invalid_argument("[cache] no groups of layers are given");
  struct Range {
    const char* what;
    int64_t value, low, high;
  };
  for (const Range& range : {Range{"num_blocks", options.num_blocks.n, 1, kMaxBlocks},
                             {"kv_memory", options.kv_memory.n, 0, kMaxKvMemory},
                             {"max_context", options.max_context.n, 0, kMaxTokens},
                             {"longest_chunk", options.longest_chunk.n, 1, kMaxBlocks},
                             {"max_sequences", options.max_sequences, 1, kMaxBlocks / 64},
                             {"q_heads_per_kv_head", options.q_heads_per_kv_head, 0, kMaxHeads}}) {
    if (range.value < range.low)
      return invalid_argument(
          str("[cache] ", range.what, " is ", range.value, ", at least ", range.low, " is needed"));
    if (range.value > range.high)
      return invalid_argument(str("[cache] ", range.what, " is ", range.value, ", the limit is ", range.high));
  }
  return Status();
}

Result<GroupDraft> draft_group(const CacheOptions& options, const GroupSpec& spec) {
  auto layout = plan_image(spec, options.block_size.n, options.arena);
  if (!layout.ok()) return layout.status();
  const int64_t image_bytes = layout->image_bytes, kv_memory = options.kv_memory.n;
  int64_t floor = options.num_blocks.n;
  if (spec.sliding_window > 0) {
    const int64_t tokens = spec.sliding_window + options.longest_chunk.n;
    floor = (blocks_for(Tokens(tokens), options.block_size).n + 1) * options.max_sequences;
  }
  if (floor > kMaxBlocks)
    return invalid_argument(str("[cache] ", floor, " blocks are asked, the limit is ", kMaxBlocks));
  if (floor > kv_memory / image_bytes) {
    return Status(Code::kCapacity,
                  str("[cache] ", floor, " blocks of ", image_bytes, " bytes take ",
                      bytes_text(saturated_product(floor, image_bytes)), ", kv_memory is ", bytes_text(kv_memory)));
  }
  return GroupDraft{std::move(*layout), floor};
}

// Errors: those of each group, and kCapacity when the floors of all together pass kv_memory.
Result<std::vector<GroupDraft>> draft_groups(const CacheOptions& options) {
  std::vector<GroupDraft> drafts;
  int64_t floor_bytes = 0;
  for (const GroupSpec& spec : options.groups) {
    auto draft = draft_group(options, spec);
    if (!draft.ok()) return draft.status();
    floor_bytes += draft->floor_blocks * draft->layout.image_bytes;
    drafts.push_back(std::move(*draft));
  }
  if (floor_bytes > options.kv_memory.n) {
    return Status(Code::kCapacity, str("[cache] the first blocks of all groups take ", bytes_text(floor_bytes),
                                       ", kv_memory is ", bytes_text(options.kv_memory.n)));
  }
  return drafts;
}

// By model layer: where it is stored.
Result<std::vector<LayerPlace>> place_layers(const std::vector<GroupSpec>& groups) {
  std::vector<LayerPlace> places;
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t i = 0; i < groups[g].layers.size(); ++i) {
      const int layer = groups[g].layers[i];
      if (layer < 0 || layer > 65535)
        return invalid_argument(str("[cache] layer index ", layer, ", allowed are 0 to 65535"));
      if (size_t(layer) >= places.size()) places.resize(size_t(layer) + 1);
      if (places[size_t(layer)].group >= 0)
        return invalid_argument(str("[cache] layer ", layer, " is in two groups"));
      places[size_t(layer)] = {int(g), int(i)};
    }
  return places;
}

// The most blocks that group `g` can have: as many as fit beside the floors of the others.
int64_t max_blocks_of(const CacheOptions& options, const std::vector<GroupDraft>& drafts, size_t g) {
  const GroupDraft& own = drafts[g];
  if (!options.dynamic) return own.floor_blocks;
  int64_t left = options.kv_memory.n;
  for (const GroupDraft& draft : drafts) left -= &draft == &own ? 0 : draft.floor_bytes();
  return std::max(own.floor_blocks, blocks_within(own.layout, left));
}

// A floor is whole extents: their rounding may pass kv_memory, what grows later may not.
int64_t budget_limit(const CacheOptions& options, const std::vector<GroupDraft>& drafts) {
  int64_t floors = 0;
  for (const GroupDraft& draft : drafts) floors += draft.floor_bytes();
  if (floors > options.kv_memory.n)
    notice(str("[cache] num_blocks rounded up to whole extents takes ", bytes_text(floors),
               ", more than kv_memory ", bytes_text(options.kv_memory.n)));
  return std::max(options.kv_memory.n, floors);
}

// Names what makes room: a window's pool is made for so many sequences and so long chunks, num_blocks is of no use
// to it.
std::string pool_limit(const CacheOptions& options, const GroupSpec& group, int64_t max_blocks) {
  if (!options.dynamic && group.sliding_window > 0)
    return str("the pool of a sliding window is made for max_sequences ", options.max_sequences,
               ", forks included, and longest_chunk ", options.longest_chunk.n,
               ": raise them; or let it grow: dynamic growth is off");
  if (!options.dynamic) return str("num_blocks is ", options.num_blocks.n, " and dynamic growth is off");
  return str("kv_memory ", bytes_text(options.kv_memory.n), " is room for ", max_blocks, " blocks");
}

kernels::RowStore row_store(const Arena& arena, const Plane& plane, const Plane& scales, Format format,
                            int64_t head_dim) {
  kernels::RowStore store{.rows = arena.address(plane),
                          .block_stride = plane.block_stride,
                          .slot_stride = plane.slot_stride,
                          .head_stride = plane.head_stride,
                          .format = format,
                          .head_dim = head_dim};
  if (is_quantized(format)) {
    store.scales = arena.address(scales);
    store.scale_block_stride = scales.block_stride;
    store.scale_slot_stride = scales.slot_stride;
    store.scale_head_stride = scales.head_stride;
  }
  return store;
}

// What kernels see of each layer of a group; num_blocks comes with each call.
std::vector<kernels::LayerStore> layer_stores(const Arena& arena, const LayerShape& shape, int64_t block_size) {
  std::vector<kernels::LayerStore> stores;
  for (const LayerPlanes& planes : arena.layout().layers)
    stores.push_back({.k = row_store(arena, planes.k, planes.k_scales, shape.formats.k, shape.head_dim_k),
                      .v = row_store(arena, planes.v, planes.v_scales, shape.formats.v, shape.head_dim_v),
                      .block_size = block_size,
                      .num_kv_heads = shape.num_kv_heads,
                      .num_blocks = 0});
  return stores;
}

}  // namespace

// Reserves every group's addresses; no memory is taken yet.
Status Cache::Impl::reserve_arenas(std::vector<GroupDraft> drafts) {
  budget.limit = budget_limit(options, drafts);
  std::vector<int64_t> max_blocks;
  for (size_t g = 0; g < drafts.size(); ++g) max_blocks.push_back(max_blocks_of(options, drafts, g));
  for (size_t g = 0; g < drafts.size(); ++g) {
    auto arena = Arena::create(std::move(drafts[g].layout), drafts[g].floor_blocks, max_blocks[g], budget);
    if (!arena.ok()) return arena.status();
    arenas.push_back(std::move(*arena));
    sources.push_back(std::make_unique<ArenaSource>(*arenas.back()));
    stores.push_back(layer_stores(*arenas.back(), options.groups[g].shape, options.block_size.n));
    floors.push_back(drafts[g].floor_blocks);
  }
  std::vector<Arena*> all;
  for (const auto& arena : arenas) all.push_back(arena.get());
  mover = std::make_unique<Mover>(std::move(all));
  return Status();
}

// Takes the memory of every group's floor.
Status Cache::Impl::open_core() {
  std::vector<CacheCore::Group> groups;
  for (size_t g = 0; g < arenas.size(); ++g) {
    const ImageLayout& image = arenas[g]->layout();
    groups.push_back({.pool = {.max_blocks = arenas[g]->max_blocks(),
                               .floor_blocks = floors[g],
                               .extent_blocks = image.extent_blocks,
                               .image_bytes = image.image_bytes,
                               .extent_bytes = image.extent_bytes,
                               .limit = pool_limit(options, options.groups[g], arenas[g]->max_blocks())},
                      .sliding_window = options.groups[g].sliding_window,
                      .source = sources[g].get()});
  }
  core = std::make_unique<CacheCore>(CacheCore::Options{.block_size = options.block_size.n,
                                                        .max_context = options.max_context.n,
                                                        .prefix_sharing = options.prefix_sharing,
                                                        .most_keyed = options.most_keyed,
                                                        .descriptor = descriptor},
                                     groups);
  const Status opened = core->open();
  return opened.ok() ? opened
                     : Status(opened.code(), "[cache] the first blocks cannot be had: " + opened.message());
}

Result<std::unique_ptr<Cache>> Cache::create(CacheOptions options) {
  if (Status status = check_options(options); !status.ok()) return status;
  const auto entry = choose_entry(options.isa);
  if (!entry.ok()) return entry.status();
  if (options.kv_memory.n == 0) options.kv_memory = Bytes(memory_limit() / 2);
  auto drafts = draft_groups(options);
  if (!drafts.ok()) return drafts.status();
  auto layers = place_layers(options.groups);
  if (!layers.ok()) return layers.status();

  auto impl = std::make_shared<Impl>();
  impl->entry = *entry;
  impl->layers = std::move(*layers);
  for (const GroupSpec& group : options.groups)
    impl->paths.push_back(
        choose_paths(options.query_path, group.shape.formats, options.q_heads_per_kv_head, *impl->entry));
  impl->descriptor = descriptor_of(options, impl->paths);
  impl->options = std::move(options);
  if (Status status = impl->reserve_arenas(std::move(*drafts)); !status.ok()) return status;
  if (Status status = impl->open_core(); !status.ok()) return status;
  if (impl->entry == &kernels::entries().back() && impl->options.isa.empty() && !env_first({"PAGEDKV_ISA"}))
    notice(str("[cache] this CPU has none of the fast instruction sets; the ", impl->entry->name, " kernels run"));
  return std::unique_ptr<Cache>(new Cache(std::move(impl)));
}

}  // namespace pagedkv
