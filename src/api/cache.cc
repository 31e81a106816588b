// Cache: joins what decides (cache/), what moves (store/) and what computes (kernels/).

#include "pagedkv/cache.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "api/isa.h"
#include "api/layer_attention.h"
#include "api/query_path.h"
#include "api/step_plan.h"
#include "base/check.h"
#include "base/env.h"
#include "base/text.h"
#include "cache/cache_core.h"
#include "kernels/kernels.h"
#include "pagedkv/log.h"
#include "pagedkv/machine.h"
#include "store/arena.h"

namespace pagedkv {
namespace {

// Lets the cache's orders reach one group's arena.
class ArenaSource : public BlockSource {
 public:
  explicit ArenaSource(Arena& arena) : arena_(arena) {}
  Status commit(int64_t extent) override { return arena_.commit(extent); }
  void decommit(int64_t extent) override { arena_.decommit(extent); }
  void copy(BlockId source, BlockId destination) override { arena_.copy(uint32_t(source), uint32_t(destination)); }
  int64_t bytes_committed() const override { return arena_.bytes_committed(); }
  int64_t blocks_left_by_budget() const override { return arena_.blocks_left_by_budget(); }

 private:
  Arena& arena_;
};

// The addresses that a process has on today's machines; sums of sizes below it stay far from 64 bits.
constexpr int64_t kMaxKvMemory = int64_t{1} << 47;

struct LayerPlace {
  int group = -1;
  int index = 0;  // within the group
};

// A group's image, and how many blocks it has at least.
struct GroupDraft {
  ImageLayout layout;
  int64_t floor_blocks = 0;
  // What the floor takes: whole extents.
  int64_t floor_bytes() const { return committed_bytes(layout, round_up(floor_blocks, layout.extent_blocks)); }
};

int64_t saturated_product(int64_t a, int64_t b) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return b > 0 && a > kMost / b ? kMost : a * b;
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

// The most blocks that group `g` can have: as many as fit beside the floors of the others.
int64_t max_blocks_of(const CacheOptions& options, const std::vector<GroupDraft>& drafts, size_t g) {
  const GroupDraft& own = drafts[g];
  if (!options.dynamic) return own.floor_blocks;
  int64_t left = options.kv_memory.n;
  for (const GroupDraft& draft : drafts) left -= &draft == &own ? 0 : draft.floor_bytes();
  return std::max(own.floor_blocks, blocks_within(own.layout, left));
}

// Parts of a key's fingerprint carry their length, so that no text of one can be read as another.
void add_part(std::string& fingerprint, std::string_view part) { fingerprint += str(part.size(), ":", part, ";"); }

std::string pool_limit(const CacheOptions& options, int64_t max_blocks) {
  if (!options.dynamic) return str("num_blocks is ", options.num_blocks.n, " and dynamic growth is off");
  return str("kv_memory ", bytes_text(options.kv_memory.n), " is room for ", max_blocks, " blocks");
}

Status check_options(const CacheOptions& options) {
  if (options.groups.empty()) return invalid_argument("[cache] no groups of layers are given");
  const auto at_least = [](const char* what, int64_t value, int64_t low) {
    return value >= low ? Status()
                        : invalid_argument(str("[cache] ", what, " is ", value, ", at least ", low, " is needed"));
  };
  for (const Status& status :
       {at_least("num_blocks", options.num_blocks.n, 1), at_least("kv_memory", options.kv_memory.n, 0),
        at_least("max_context", options.max_context.n, 0), at_least("longest_chunk", options.longest_chunk.n, 1),
        at_least("max_sequences", options.max_sequences, 1)}) {
    if (!status.ok()) return status;
  }
  const auto at_most = [](const char* what, int64_t value, int64_t limit) {
    return value <= limit ? Status()
                          : invalid_argument(str("[cache] ", what, " is ", value, ", the limit is ", limit));
  };
  for (const Status& status : {at_most("num_blocks", options.num_blocks.n, kMaxBlocks),
                               at_most("kv_memory", options.kv_memory.n, kMaxKvMemory),
                               at_most("max_context", options.max_context.n, kMaxTokens)}) {
    if (!status.ok()) return status;
  }
  if (options.longest_chunk.n > kMaxBlocks || options.max_sequences > kMaxBlocks / 64)
    return invalid_argument(str("[cache] longest_chunk ", options.longest_chunk.n, " or max_sequences ",
                                options.max_sequences, " is out of range"));
  return Status();
}

}  // namespace

const char* prefix_reason_name(PrefixReason reason) {
  switch (reason) {
    case PrefixReason::kHit:
      return "hit";
    case PrefixReason::kNew:
      return "new";
    case PrefixReason::kEvicted:
      return "evicted";
    case PrefixReason::kWindowGone:
      return "window_gone";
    case PrefixReason::kLastToken:
      return "last_token";
    case PrefixReason::kCollision:
      return "collision";
    case PrefixReason::kNoRoom:
      return "no_room";
    case PrefixReason::kOff:
      return "off";
  }
  return "unknown";
}

const char* arena_order_name(ArenaOrder order) {
  return order == ArenaOrder::kBlockMajor ? "block_major" : "layer_major";
}

namespace {

uint64_t next_cache_id() {
  static std::atomic<uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

struct Cache::Impl : StepPlan::Impl::Home {
  enum Kernel { kAppend, kAttend, kMerge, kKernels };

  const uint64_t id = next_cache_id();  // unlike an address, never another cache's later on
  CacheOptions options;
  const kernels::Entry* entry = nullptr;
  MemoryBudget budget;
  std::vector<std::unique_ptr<Arena>> arenas;         // per group
  std::vector<std::unique_ptr<ArenaSource>> sources;  // per group
  std::unique_ptr<CacheCore> core;
  std::vector<LayerPlace> layers;                        // by model layer
  std::vector<std::vector<kernels::LayerStore>> stores;  // by group, by index in it
  kernels::AppendCounters append_counters;
  std::vector<ProductPaths> paths;  // per group
  std::atomic<int64_t> calls[kKernels] = {};
  mutable int64_t dense_materializations = 0, dequantized_rows = 0;
  std::unique_ptr<StepPlan::Impl>
      spare;  // of the last ended step, to be filled again: no allocation in a steady state

  void take_back(std::unique_ptr<StepPlan::Impl> plan) override {
    if (plan->arrays.step != 0) core->abandon(plan->arrays);
    spare = std::move(plan);
  }

  Result<LayerPlace> place(int layer) const {
    if (layer >= 0 && size_t(layer) < layers.size() && layers[size_t(layer)].group >= 0)
      return layers[size_t(layer)];
    return invalid_argument(str("[cache] layer ", layer, " is in no group"));
  }
  bool has_group(int group) const {
    const bool known = group >= 0 && group < core->n_groups();
    PKV_REQUIRES(known);
    return known;
  }
  const kernels::LayerStore& store(LayerPlace at) const { return stores[size_t(at.group)][size_t(at.index)]; }
  kernels::AttendShape shape(const StepPlan::Impl& plan, int group) const {
    const GroupSpec& spec = options.groups[size_t(group)];
    return {.num_q_heads = plan.num_q_heads != 0 ? plan.num_q_heads : spec.num_q_heads,
            .sliding_window = spec.sliding_window,
            .k_codes = paths[size_t(group)].k_codes,
            .v_codes = paths[size_t(group)].v_codes};
  }
  // Ids below this have memory; it moves with growth, so kernels get it per call.
  kernels::LayerStore store_now(LayerPlace at) const {
    kernels::LayerStore layer = store(at);
    layer.num_blocks = core->pool(at.group).end_id();
    return layer;
  }
  LayerAttention attention(const StepPlan::Impl& plan, LayerPlace at, const kernels::AttendShape& shape) const {
    return {store_now(at), plan.batch(size_t(at.group)), shape, plan.work[size_t(at.group)], *entry};
  }
  Result<kernels::AttendCall> attend_call(const AttendArgs& args, Part part) const;
  // Rows of positions [first, length) as floats. Errors: kInvalidArgument when the table has given one back.
  Status decode(LayerPlace at, std::span<const int32_t> table, int64_t first, int64_t length, const DenseRows& k,
                const DenseRows& v) const;
  Status check_plan(const StepPlan::Impl& plan) const {
    if (plan.owner != id || (!plan.read_only && plan.arrays.step == 0))
      return invalid_argument("[cache] the plan is of another cache, was moved from, or its step has ended");
    return plan.read_only ? core->check_current(plan.arrays) : Status();
  }
  Status check_step(const StepPlan::Impl& plan) const {
    return plan.read_only ? invalid_argument("[cache] the plan only reads") : check_plan(plan);
  }
  void plan_group_work(StepPlan::Impl& plan) const {
    plan.work.resize(options.groups.size());
    for (size_t g = 0; g < plan.work.size(); ++g)
      plan_work(plan.batch(g), shape(plan, int(g)), options.groups[g].shape.num_kv_heads, plan.work[g]);
  }
};

Cache::Cache(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Cache::~Cache() = default;

Result<std::unique_ptr<Cache>> Cache::create(CacheOptions options) {
  if (Status status = check_options(options); !status.ok()) return status;
  auto impl = std::make_shared<Impl>();
  auto entry = choose_entry(options.isa);
  if (!entry.ok()) return entry.status();
  impl->entry = *entry;
  if (options.kv_memory.n == 0) options.kv_memory = Bytes(memory_limit() / 2);
  impl->budget.limit = options.kv_memory.n;

  std::vector<GroupDraft> drafts;
  for (size_t g = 0; g < options.groups.size(); ++g) {
    GroupSpec& spec = options.groups[g];
    if (spec.num_q_heads == 0) spec.num_q_heads = spec.shape.num_kv_heads;
    auto draft = draft_group(options, spec);
    if (!draft.ok()) return draft.status();
    drafts.push_back(std::move(*draft));
    for (size_t i = 0; i < spec.layers.size(); ++i) {
      const int layer = spec.layers[i];
      if (layer < 0 || layer > 65535)
        return invalid_argument(str("[cache] layer index ", layer, ", allowed are 0 to 65535"));
      if (size_t(layer) >= impl->layers.size()) impl->layers.resize(size_t(layer) + 1);
      if (impl->layers[size_t(layer)].group >= 0)
        return invalid_argument(str("[cache] layer ", layer, " is in two groups"));
      impl->layers[size_t(layer)] = {int(g), int(i)};
    }
  }
  int64_t floor_bytes = 0;
  for (const GroupDraft& draft : drafts) floor_bytes += draft.floor_blocks * draft.layout.image_bytes;
  if (floor_bytes > options.kv_memory.n) {
    return Status(Code::kCapacity, str("[cache] the first blocks of all groups take ", bytes_text(floor_bytes),
                                       ", kv_memory is ", bytes_text(options.kv_memory.n)));
  }

  std::vector<CacheCore::Group> groups;
  for (size_t g = 0; g < drafts.size(); ++g) {
    const int64_t floor_blocks = drafts[g].floor_blocks;
    auto arena = Arena::create(drafts[g].layout, floor_blocks, max_blocks_of(options, drafts, g), impl->budget);
    if (!arena.ok()) return arena.status();
    impl->arenas.push_back(std::move(*arena));
    impl->sources.push_back(std::make_unique<ArenaSource>(*impl->arenas.back()));
    const ImageLayout& image = impl->arenas.back()->layout();
    groups.push_back({.pool = {.max_blocks = impl->arenas.back()->max_blocks(),
                               .floor_blocks = floor_blocks,
                               .extent_blocks = image.extent_blocks,
                               .image_bytes = image.image_bytes,
                               .extent_bytes = image.extent_bytes,
                               .limit = pool_limit(options, impl->arenas.back()->max_blocks())},
                      .sliding_window = options.groups[g].sliding_window,
                      .source = impl->sources.back().get()});
  }
  // The floor is whole extents; it may pass the budget by the last extent's rounding, what grows later may not.
  for (const auto& arena : impl->arenas) impl->budget.limit += 2 * arena->layout().extent_bytes;

  // What makes K and V of equal tokens differ goes into every key.
  std::string fingerprint;
  add_part(fingerprint, str("block ", options.block_size.n));
  add_part(fingerprint, options.fingerprint);
  for (const GroupSpec& spec : options.groups) {
    std::string group = str(kv_quant_name(spec.shape.formats), " ", spec.shape.num_kv_heads, "x",
                            spec.shape.head_dim_k, ":", spec.shape.head_dim_v, " window ", spec.sliding_window);
    for (int layer : spec.layers) group += str(" ", layer);
    const ProductPaths paths = choose_paths(options.query_path, spec, *impl->entry);
    if (paths.k_codes || paths.v_codes) group += str(" codes ", paths.k_codes, paths.v_codes);
    add_part(fingerprint, group);
    impl->paths.push_back(paths);
  }
  impl->core = std::make_unique<CacheCore>(CacheCore::Options{.block_size = options.block_size.n,
                                                              .max_context = options.max_context.n,
                                                              .prefix_sharing = options.prefix_sharing,
                                                              .fingerprint = fingerprint},
                                           groups);
  if (Status status = impl->core->open(); !status.ok()) {
    return Status(status.code(), "[cache] the first blocks cannot be had: " + status.message());
  }
  impl->budget.limit = std::max(options.kv_memory.n, impl->budget.committed);
  if (impl->budget.committed > options.kv_memory.n)
    notice(str("[cache] num_blocks rounded up to whole extents takes ", bytes_text(impl->budget.committed),
               ", more than kv_memory ", bytes_text(options.kv_memory.n)));

  for (size_t g = 0; g < options.groups.size(); ++g) {
    const Arena& arena = *impl->arenas[g];
    const LayerShape& shape = options.groups[g].shape;
    auto& stores = impl->stores.emplace_back();
    for (const LayerPlanes& planes : arena.layout().layers) {
      const auto rows = [&](const Plane& plane, const Plane& scales, Format format, int64_t head_dim) {
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
      };
      stores.push_back({.k = rows(planes.k, planes.k_scales, shape.formats.k, shape.head_dim_k),
                        .v = rows(planes.v, planes.v_scales, shape.formats.v, shape.head_dim_v),
                        .block_size = options.block_size.n,
                        .num_kv_heads = shape.num_kv_heads,
                        .num_blocks = 0});
    }
  }
  if (impl->entry == &kernels::entries().back() && options.isa.empty() && !env_first({"PAGEDKV_ISA"}))
    notice(str("[cache] this CPU has none of the fast instruction sets; the ", impl->entry->name, " kernels run"));
  impl->options = std::move(options);
  return std::unique_ptr<Cache>(new Cache(std::move(impl)));
}

// --- sequences -----------------------------------------------------------------------------------------------

Result<Started> Cache::start(std::span<const int32_t> prompt, const StartOptions& options) {
  return impl_->core->start(prompt, options);
}
Result<SequenceId> Cache::fork(SequenceId sequence) { return impl_->core->fork(sequence); }
Status Cache::truncate(SequenceId sequence, Tokens new_length) {
  return impl_->core->truncate(sequence, new_length.n);
}
Status Cache::release(SequenceId sequence) { return impl_->core->release(sequence); }
void Cache::clear_cached() { impl_->core->clear_cached(); }

std::vector<PrefixKey> Cache::prefix_keys(std::span<const int32_t> prompt, std::string_view name_space) const {
  return impl_->core->hash_prompt(prompt, name_space);
}

PrefixMatch Cache::match(std::span<const int32_t> prompt, std::span<const PrefixKey> keys,
                         std::string_view name_space) const {
  return impl_->core->look_up(prompt, keys, name_space);
}

Result<Tokens> Cache::length(SequenceId sequence) const {
  auto length = impl_->core->length(sequence);
  if (!length.ok()) return length.status();
  return Tokens(*length);
}

Result<Blocks> Cache::blocks_held(SequenceId sequence, int group) const {
  auto held = impl_->core->blocks_held(sequence, group);
  if (!held.ok()) return held.status();
  return Blocks(*held);
}

Status Cache::grow_to_capacity(Tokens tokens) {
  if (tokens.n < 0) return invalid_argument(str("[grow] ", tokens.n, " tokens are asked"));
  const int64_t blocks = blocks_for(tokens, impl_->options.block_size).n;
  const auto& pool = impl_->core->pool(impl_->core->main_group());
  const int64_t have = pool.counts().total;
  Status status = impl_->core->raise_floor(blocks);
  if (status.ok()) return status;
  return Status(status.code(),
                str("[grow] need ", tokens.n, " tokens (", blocks, " blocks), have ",
                    have * impl_->options.block_size.n, " tokens (", have, " blocks); ", status.message()));
}

Result<Blocks> Cache::keep_committed(int group) {
  if (group < 0 || group >= impl_->core->n_groups())
    return invalid_argument(str("[cache] group ", group, " of ", impl_->core->n_groups()));
  if (Status status = impl_->core->keep_committed(group); !status.ok()) return status;
  return Blocks(impl_->core->pool(group).end_id());
}

// --- one step ------------------------------------------------------------------------------------------------

Result<StepPlan> Cache::reserve(std::span<const StepRequest> requests) {
  auto plan = impl_->spare ? std::move(impl_->spare) : std::make_unique<StepPlan::Impl>();
  plan->owner = impl_->id;
  plan->home = impl_;
  plan->read_only = false;
  plan->num_q_heads = 0;
  if (Status status = impl_->core->reserve(requests, plan->arrays); !status.ok()) {
    impl_->spare = std::move(plan);
    return status;
  }
  plan->faults.assign(requests.size(), kernels::kNoFault);
  impl_->plan_group_work(*plan);
  return StepPlan(std::move(plan));
}

Result<StepPlan> Cache::plan_read(std::span<const ReadRequest> requests, int64_t num_q_heads) const {
  for (const GroupSpec& spec : impl_->options.groups)
    if (num_q_heads < 0 || num_q_heads > kMaxHeads || num_q_heads % spec.shape.num_kv_heads != 0)
      return invalid_argument(str("[plan_read] ", num_q_heads, " query heads are no multiple of ",
                                  spec.shape.num_kv_heads, " KV heads"));
  auto plan = std::make_unique<StepPlan::Impl>();
  plan->owner = impl_->id;
  plan->read_only = true;
  plan->num_q_heads = num_q_heads;
  if (Status status = impl_->core->read(requests, plan->arrays); !status.ok()) return status;
  impl_->plan_group_work(*plan);
  return StepPlan(std::move(plan));
}

Status Cache::append(StepPlan& plan, int layer, const KvRows& k, const KvRows& v, Part part) {
  const auto at = impl_->place(layer);
  if (!at.ok()) return at.status();
  if (Status status = impl_->check_step(plan.impl()); !status.ok()) return status;
  if (Status status = check_part("append", part); !status.ok()) return status;
  if (k.data == nullptr || v.data == nullptr) return invalid_argument("[append] K or V is null");
  if (part.index == 0) impl_->calls[Impl::kAppend].fetch_add(1, std::memory_order_relaxed);

  const LayerShape& shape = impl_->options.groups[size_t(at->group)].shape;
  const auto resolved = [&](KvRows rows, int64_t head_dim) {
    if (rows.head_stride == 0) rows.head_stride = head_dim;
    if (rows.token_stride == 0) rows.token_stride = head_dim * shape.num_kv_heads;
    return rows;
  };
  impl_->entry->append({.layer = impl_->store_now(*at),
                        .batch = plan.impl_->batch(size_t(at->group)),
                        .k = resolved(k, shape.head_dim_k),
                        .v = resolved(v, shape.head_dim_v),
                        .layer_index = layer,
                        .faults = plan.impl_->faults.data(),
                        .counters = &impl_->append_counters},
                       part);
  return Status();
}

Result<kernels::AttendCall> Cache::Impl::attend_call(const AttendArgs& args, Part part) const {
  const auto at = place(args.layer);
  if (!at.ok()) return at.status();
  const StepPlan::Impl& plan = args.plan.impl();
  if (Status status = check_plan(plan); !status.ok()) return status;
  kernels::AttendShape attend_shape = shape(plan, at->group);
  if (args.sliding_window < 0 ||
      (attend_shape.sliding_window > 0 && args.sliding_window > attend_shape.sliding_window))
    return invalid_argument(
        str("[attend] window ", args.sliding_window, " is asked, the group's is ", attend_shape.sliding_window));
  if (args.sliding_window > 0) attend_shape.sliding_window = args.sliding_window;
  return attention(plan, *at, attend_shape).call("attend", args, args.q_token_stride, part);
}

Status Cache::attend(const AttendArgs& args, Part part) {
  const auto call = impl_->attend_call(args, part);
  if (!call.ok()) return call.status();
  if (part.index == 0) impl_->calls[Impl::kAttend].fetch_add(1, std::memory_order_relaxed);
  impl_->entry->attend(*call, part);
  return Status();
}

Status Cache::merge(const AttendArgs& args, Part part) {
  const auto call = impl_->attend_call(args, part);
  if (!call.ok()) return call.status();
  if (part.index == 0) impl_->calls[Impl::kMerge].fetch_add(1, std::memory_order_relaxed);
  impl_->entry->merge(*call, part);
  return Status();
}

Bytes Cache::scratch_bytes(const StepPlan& plan, int n_parts) const {
  PKV_REQUIRES(n_parts >= 1);
  if (!impl_->check_plan(plan.impl()).ok() || n_parts < 1) return Bytes(0);
  int64_t most = 64;
  for (int g = 0; g < impl_->core->n_groups(); ++g)
    most =
        std::max(most, impl_->attention(plan.impl(), {g, 0}, impl_->shape(plan.impl(), g)).scratch_bytes(n_parts));
  return Bytes(most);
}

Result<std::vector<Status>> Cache::faults(const StepPlan& plan) const {
  if (Status status = impl_->check_step(plan.impl()); !status.ok()) return status;
  const StepPlan::Impl& step = plan.impl();
  std::vector<Status> rejected(step.faults.size());
  for (size_t i = 0; i < step.faults.size(); ++i) {
    const uint64_t fault = step.faults[i];
    if (fault == kernels::kNoFault) continue;
    rejected[i] = Status(Code::kNotFinite,
                         str("[append] NaN or infinity in layer ", fault >> 48, ", KV head ",
                             (fault >> 32) & 0xffff, ", position ", step.arrays.positions[fault & 0xffffffff]));
  }
  return rejected;
}

Result<std::vector<Status>> Cache::commit(StepPlan&& plan, std::span<const Tokens> accepted) {
  auto rejected = faults(plan);
  if (!rejected.ok()) return rejected.status();
  auto ended = impl_->core->commit(plan.impl_->arrays, accepted, std::move(*rejected));
  if (ended.ok()) impl_->spare = std::move(plan.impl_);
  return ended;
}

// --- views and figures ---------------------------------------------------------------------------------------

const CacheOptions& Cache::options() const { return impl_->options; }
QueryPath Cache::query_path(int group) const {
  if (!impl_->has_group(group)) return QueryPath::kF32;
  const ProductPaths paths = impl_->paths[size_t(group)];
  return paths.k_codes || paths.v_codes ? QueryPath::kInt8 : QueryPath::kF32;
}
std::string_view Cache::isa() const { return impl_->entry->name; }
Status Cache::verify() const { return impl_->core->verify(); }
Bytes Cache::image_bytes(int group) const {
  return impl_->has_group(group) ? Bytes(impl_->arenas[size_t(group)]->layout().image_bytes) : Bytes(0);
}

Result<LayerTensors> Cache::tensors(int layer) const {
  const auto at = impl_->place(layer);
  if (!at.ok()) return at.status();
  const Arena& arena = *impl_->arenas[size_t(at->group)];
  return arena.tensors(at->index, arena.max_blocks());
}

Tokens Cache::capacity() const {
  return Tokens(impl_->arenas[size_t(impl_->core->main_group())]->max_blocks() * impl_->options.block_size.n);
}

Tokens Cache::available() const {
  return Tokens(impl_->core->pool(impl_->core->main_group()).takable() * impl_->options.block_size.n);
}

Tokens Cache::available_beside(const PrefixMatch& match) const {
  return available() - Tokens(impl_->core->idle_blocks(match) * impl_->options.block_size.n);
}

Tokens Cache::committed_capacity() const {
  return Tokens(impl_->core->pool(impl_->core->main_group()).counts().total * impl_->options.block_size.n);
}

Result<Cache::Dense> Cache::read_dense(SequenceId sequence, int layer) const {
  const auto at = impl_->place(layer);
  if (!at.ok()) return at.status();
  const auto length = impl_->core->length(sequence);
  const auto table = impl_->core->table(sequence, at->group);
  if (!length.ok()) return length.status();
  if (!table.ok()) return table.status();
  const LayerShape& shape = impl_->options.groups[size_t(at->group)].shape;
  Dense dense{.k = std::vector<float>(size_t(*length * shape.num_kv_heads * shape.head_dim_k)),
              .v = std::vector<float>(size_t(*length * shape.num_kv_heads * shape.head_dim_v))};
  std::vector<int32_t> blocks(table->size());
  std::ranges::transform(*table, blocks.begin(), [](BlockId id) { return int32_t(id); });
  const auto rows = [&](std::vector<float>& to, int64_t head_dim) {
    return DenseRows{.data = to.data(), .token_stride = shape.num_kv_heads * head_dim, .head_stride = head_dim};
  };
  if (Status status =
          impl_->decode(*at, blocks, 0, *length, rows(dense.k, shape.head_dim_k), rows(dense.v, shape.head_dim_v));
      !status.ok())
    return status;
  return dense;
}

Status Cache::read_dense(const StepPlan& plan, int64_t place, int layer, Tokens first, const DenseRows& k,
                         const DenseRows& v) const {
  const auto at = impl_->place(layer);
  if (!at.ok()) return at.status();
  const StepPlan::Impl& step = plan.impl();
  if (Status status = impl_->check_plan(step); !status.ok()) return status;
  const StepArrays& arrays = step.arrays;
  if (place < 0 || place >= int64_t(arrays.seq_lens.size()))
    return invalid_argument(str("[read_dense] sequence ", place, " of a plan of ", arrays.seq_lens.size()));
  const int64_t length = arrays.seq_lens[size_t(place)];
  if (first.n < 0 || first.n > length)
    return invalid_argument(str("[read_dense] first is ", first.n, ", the sequence has ", length, " tokens"));
  const StepArrays::Group& group = arrays.groups[size_t(at->group)];
  const std::span table(group.block_tables.data() + place * group.max_blocks, size_t(group.max_blocks));
  return impl_->decode(*at, table, first.n, length, k, v);
}

Status Cache::Impl::decode(LayerPlace at, std::span<const int32_t> table, int64_t first, int64_t length,
                           const DenseRows& k, const DenseRows& v) const {
  const kernels::LayerStore& layer = store(at);
  const int64_t first_block = first / layer.block_size;
  const int64_t end_block = blocks_for(Tokens(length), Tokens(layer.block_size)).n;
  for (int64_t b = first_block; b < end_block; ++b)
    if (table[size_t(b)] < 0)
      return invalid_argument(str("[read_dense] the window has given the rows of positions ", b * layer.block_size,
                                  " to ", (b + 1) * layer.block_size - 1, " back"));
  const auto decode_rows = [&](const kernels::RowStore& rows, const DenseRows& to) {
    // Where a block's rows of a head follow each other here and there, one call decodes them all.
    const bool runs = rows.slot_stride == row_bytes(rows.format, rows.head_dim).n &&
                      (rows.scales == nullptr || rows.scale_slot_stride == 4) && to.token_stride == rows.head_dim;
    for (int64_t b = first_block; b < end_block; ++b) {
      const int64_t begin = std::max(first, b * layer.block_size);
      const int64_t end = std::min(length, (b + 1) * layer.block_size);
      const int64_t step = runs ? end - begin : 1;
      for (int64_t head = 0; head < layer.num_kv_heads; ++head)
        for (int64_t position = begin; position < end; position += step) {
          const int64_t slot = position - b * layer.block_size, block = table[size_t(b)];
          const std::byte* row =
              rows.rows + block * rows.block_stride + slot * rows.slot_stride + head * rows.head_stride;
          const std::byte* scale = rows.scales == nullptr
                                       ? nullptr
                                       : rows.scales + block * rows.scale_block_stride +
                                             slot * rows.scale_slot_stride + head * rows.scale_head_stride;
          entry->dequantize(row, reinterpret_cast<const float*>(scale), step, rows.head_dim, rows.format,
                            to.data + (position - first) * to.token_stride + head * to.head_stride);
        }
    }
  };
  decode_rows(layer.k, k);
  decode_rows(layer.v, v);
  ++dense_materializations;
  dequantized_rows += 2 * (length - first) * layer.num_kv_heads;
  return Status();
}

Cache::BlockViews Cache::block_views(int group) const {
  if (!impl_->has_group(group)) return {};
  return {impl_->core->block_views(group), impl_->core->last_step()};
}

Stats Cache::stats(bool resident) const {
  Stats s;
  const CacheCore& core = *impl_->core;
  for (int g = 0; g < core.n_groups(); ++g) {
    const Arena& arena = *impl_->arenas[size_t(g)];
    const BlockPool& pool = core.pool(g);
    const auto& counts = pool.counts();
    s.bytes_reserved += arena.bytes_reserved();
    s.bytes_committed += arena.bytes_committed();
    if (resident) s.bytes_resident += arena.bytes_resident();
    s.extent_bytes = std::max(s.extent_bytes, arena.layout().extent_bytes);
    s.bytes_in_use += (counts.open + counts.full + counts.shared) * arena.layout().image_bytes;
    s.blocks_total += counts.total;
    s.blocks_free += counts.free;
    s.blocks_open += counts.open;
    s.blocks_full += counts.full;
    s.blocks_shared += counts.shared;
    s.blocks_cached += counts.cached;
    s.quarantined_blocks += counts.quarantined;
    s.alloc_events += pool.events().alloc;
    s.growth_events += pool.events().growth;
    s.shrink_events += pool.events().shrink;
    s.evictions += pool.events().eviction;
  }
  if (s.blocks_total > 0)
    s.block_utilization = double(s.blocks_total - s.blocks_free - s.blocks_cached) / double(s.blocks_total);
  const auto figures = core.figures();
  s.sequences = figures.sequences;
  s.tokens = figures.tokens;
  s.copies = figures.copies;
  s.hit_tokens = figures.tokens_by_reason[size_t(PrefixReason::kHit)];
  for (int reason = 0; reason < kPrefixReasons; ++reason) {
    const int64_t tokens = figures.tokens_by_reason[size_t(reason)];
    if (tokens > 0) s.hits_by_reason[prefix_reason_name(PrefixReason(reason))] = tokens;
  }
  s.dense_materializations = impl_->dense_materializations;
  s.dequantized_rows = impl_->dequantized_rows;
  s.floor_clamped_rows = impl_->append_counters.floor_clamped_rows;
  s.saturated_values = impl_->append_counters.saturated_values;
  const char* names[] = {"append", "attend", "merge"};
  for (int kernel = 0; kernel < Impl::kKernels; ++kernel)
    if (const int64_t n = impl_->calls[kernel].load(std::memory_order_relaxed); n > 0)
      s.kernel_calls[str(names[kernel], ".", impl_->entry->name)] = n;
  if (impl_->entry == &kernels::entries().back())
    for (const char* name : names) s.fallbacks[name] = str("the portable ", impl_->entry->name, " kernels run");
  return s;
}

}  // namespace pagedkv
