// Cache: sequences, one step, and views. create.cc makes one; dense.cc reads rows back; cache_stats.cc counts.

#include "pagedkv/cache.h"

#include <algorithm>

#include "api/cache_impl.h"

namespace pagedkv {

Cache::Cache(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Cache::~Cache() = default;

// --- sequences -----------------------------------------------------------------------------------------------

PrefixMatch Cache::match(std::span<const int32_t> prompt, std::string_view name_space) const {
  return match(prompt, {.name_space = std::string(name_space)});
}

PrefixMatch Cache::match(std::span<const int32_t> prompt, PrefixMatch earlier) const {
  PrefixMatch match = std::move(earlier);
  match.keys = impl_->core->hash_prompt(prompt, match.name_space, std::move(match.keys));
  impl_->core->look_up(prompt, match);
  return match;
}

Result<Started> Cache::start(std::span<const int32_t> prompt, const StartOptions& options) {
  const bool keyed = impl_->options.prefix_sharing && (options.reuse || options.store);
  return impl_->start(prompt, options.name_space,
                      keyed ? impl_->core->hash_prompt(prompt, options.name_space) : std::vector<Key>(), options);
}

Result<Started> Cache::start(std::span<const int32_t> prompt, const PrefixMatch& match,
                             const StartOptions& options) {
  return impl_->start(prompt, match.name_space, impl_->core->hash_prompt(prompt, match.name_space, match.keys),
                      options);
}

Result<Started> Cache::Impl::start(std::span<const int32_t> prompt, std::string_view name_space,
                                   std::span<const Key> keys, const StartOptions& start_options) {
  orders.clear();
  auto started = core->start(prompt, name_space, keys, start_options, orders);
  mover->carry_out(orders);
  return started;
}
Result<SequenceId> Cache::fork(SequenceId sequence) { return impl_->core->fork(sequence); }
Status Cache::truncate(SequenceId sequence, Tokens new_length) {
  return impl_->core->truncate(sequence, new_length.n);
}
Status Cache::release(SequenceId sequence) { return impl_->core->release(sequence); }
void Cache::clear_cached() { impl_->core->clear_cached(); }

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
  if (Status status = impl_->core->reserve(requests, plan->arrays); !status.ok()) {
    impl_->spare = std::move(plan);
    return status;
  }
  impl_->mover->carry_out(plan->arrays.orders);
  plan->faults.assign(requests.size(), kernels::kNoFault);
  impl_->plan_group_work(*plan);
  return StepPlan(std::move(plan));
}

Result<StepPlan> Cache::plan_read(std::span<const ReadRequest> requests) const {
  auto plan = std::make_unique<StepPlan::Impl>();
  plan->owner = impl_->id;
  plan->read_only = true;
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
  const int64_t kv_heads = options.groups[size_t(at->group)].shape.num_kv_heads;
  if (args.num_q_heads < 0 || args.num_q_heads > kMaxHeads || args.num_q_heads % kv_heads != 0)
    return invalid_argument(
        str("[attend] ", args.num_q_heads, " query heads are no multiple of ", kv_heads, " KV heads"));
  kernels::AttendShape attend_shape = shape(at->group, args.num_q_heads);
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

Bytes Cache::scratch_bytes(const StepPlan& plan, int n_parts, int64_t num_q_heads) const {
  const bool sane = n_parts >= 1 && num_q_heads >= 0 && num_q_heads <= kMaxHeads;
  PKV_REQUIRES(sane);
  if (!sane || !impl_->check_plan(plan.impl()).ok()) return Bytes(0);
  int64_t most = 64;
  for (int g = 0; g < impl_->core->n_groups(); ++g)
    most =
        std::max(most, impl_->attention(plan.impl(), {g, 0}, impl_->shape(g, num_q_heads)).scratch_bytes(n_parts));
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

std::array<uint8_t, 32> Cache::descriptor() const { return impl_->descriptor.bytes; }

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

BlockViews Cache::block_views(int group) const {
  if (!impl_->has_group(group)) return {};
  return {impl_->core->block_views(group), impl_->core->last_step()};
}

}  // namespace pagedkv
