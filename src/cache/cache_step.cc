// One step of the cache core: reserve, commit, abandon, and what they do to tables and keys.

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/text.h"
#include "cache/cache_core.h"

namespace pagedkv {
namespace {

constexpr int64_t kMaxStepTokens = kMaxTokens;  // query_start_loc is int32

}  // namespace

Status CacheCore::check_length(int64_t length, int64_t n_new) const {
  const int64_t limit = options_.max_context > 0 ? options_.max_context : kMaxTokens;
  if (n_new <= limit - length) return Status();
  return invalid_argument(
      str("[cache] ", length, " tokens and ", n_new, " new ones pass the context of ", limit, " tokens"));
}

// Marks every sequence of the step, or none.
Result<std::vector<CacheCore::Sequence*>> CacheCore::begin_step(std::span<const StepRequest> requests,
                                                                StepArrays& out) {
  std::vector<Sequence*> sequences;
  Status refused;
  int64_t n_tokens = 0;
  const uint64_t step = last_step_ + 1;
  out.sequences.clear();
  out.orders.clear();
  for (const StepRequest& request : requests) {
    auto found = find(request.sequence);
    const int64_t n_new = request.tokens.empty() ? request.n_tokens.n : int64_t(request.tokens.size());
    if (!found.ok())
      refused = found.status();
    else if ((*found)->step == step)
      refused = invalid_argument(str("[reserve] sequence ", request.sequence.index, " is in the batch twice"));
    else if ((*found)->step != 0)
      refused = invalid_argument(str("[reserve] sequence ", request.sequence.index, " has an open step already"));
    else if (n_new < 1)
      refused = invalid_argument(str("[reserve] ", n_new, " new tokens for a sequence, at least 1 is needed"));
    else if (n_new > kMaxStepTokens - n_tokens)
      refused = invalid_argument(str("[reserve] more than ", kMaxStepTokens, " new tokens in one step"));
    else
      refused = check_length((*found)->length, n_new);
    if (!refused.ok()) break;
    n_tokens += n_new;
    (*found)->step = step;
    sequences.push_back(*found);
    out.sequences.push_back({request.sequence, (*found)->length, n_new});
  }
  if (!refused.ok()) {
    for (Sequence* s : sequences) s->step = 0;
    return refused;
  }
  last_step_ = out.step = step;
  for (const auto& pool : pools_) pool->set_step(int64_t(step));
  return sequences;
}

// A last block that is shared or keyed is copied before it is written. Of a shared one each writer takes a copy but
// the last holder, who writes in place.
int64_t CacheCore::blocks_to_take(int group, std::span<Sequence* const> sequences,
                                  std::span<const StepSequence> steps) const {
  const BlockPool& pool = *pools_[size_t(group)];
  const int64_t block_size = options_.block_size;
  int64_t n = 0;
  std::vector<BlockId> shared;  // last blocks with several holders, once for each writer
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& s = *sequences[i];
    const auto& ids = s.tables[size_t(group)].ids;
    n += (s.length + steps[i].n_new + block_size - 1) / block_size - int64_t(ids.size());
    if (s.length % block_size == 0) continue;
    const BlockId tail = ids[size_t(s.length / block_size)];
    if (pool.entry(tail) != kNoEntry)
      ++n;
    else if (pool.holders(tail) > 1)
      shared.push_back(tail);
  }
  std::ranges::sort(shared);
  for (size_t begin = 0, end = 0; begin < shared.size(); begin = end) {
    while (end < shared.size() && shared[end] == shared[begin]) ++end;
    n += std::min(int64_t(end - begin), int64_t(pool.holders(shared[begin])) - 1);
  }
  return n;
}

// Makes sure every group has so many free blocks. On failure only memory that nobody used changed.
std::optional<CacheCore::NoRoom> CacheCore::free_blocks(std::span<const int64_t> need) {
  for (int g = 0; g < n_groups(); ++g) {
    BlockPool& pool = *pools_[size_t(g)];
    if (pool.ensure_takable(need[size_t(g)])) continue;
    NoRoom none{.group = g, .have = pool.counts().free + pool.counts().cached, .refusal = pool.last_refusal()};
    for (auto& each : pools_) each->shrink();
    return none;
  }
  for (int g = 0; g < n_groups(); ++g) PKV_CHECK(pools_[size_t(g)]->ensure_free(need[size_t(g)]));
  return std::nullopt;
}

Status CacheCore::make_room(std::span<Sequence* const> sequences, std::span<const StepSequence> steps) {
  std::vector<int64_t> need;
  for (int g = 0; g < n_groups(); ++g) need.push_back(blocks_to_take(g, sequences, steps));
  const auto none = free_blocks(need);
  if (!none) return Status();
  int64_t n_tokens = 0;
  for (const StepSequence& step : steps) n_tokens += step.n_new;
  std::string message = str("[reserve] need ", n_tokens, " tokens (", need[size_t(none->group)], " blocks), have ",
                            none->have * options_.block_size, " tokens (", none->have, " blocks)");
  if (n_groups() > 1) message += str(" in group ", none->group);
  return Status(none->refusal.code(), message + "; " + none->refusal.message());
}

Status CacheCore::reserve(std::span<const StepRequest> requests, StepArrays& out) {
  auto sequences = begin_step(requests, out);
  if (!sequences.ok()) return sequences.status();
  if (Status status = make_room(*sequences, out.sequences); !status.ok()) {
    for (Sequence* s : *sequences) s->step = 0;
    out.step = 0;
    return status;
  }
  // From here on nothing can fail.
  for (size_t i = 0; i < requests.size(); ++i) {
    Sequence& s = *(*sequences)[i];
    s.version = ++last_version_;
    extend_tables(s, s.length + out.sequences[i].n_new, out.orders);
    if (int64_t(s.tokens.size()) == s.length)
      s.tokens.insert(s.tokens.end(), requests[i].tokens.begin(), requests[i].tokens.end());
  }
  fill_arrays(std::vector<const Sequence*>(sequences->begin(), sequences->end()), out);
  return Status();
}

Status CacheCore::read(std::span<const ReadRequest> requests, StepArrays& out) const {
  std::vector<const Sequence*> sequences;
  int64_t n_queries = 0;
  out.sequences.clear();
  out.versions.clear();
  for (const ReadRequest& request : requests) {
    auto found = find(request.sequence);
    if (!found.ok()) return found.status();
    const Sequence& s = **found;
    const int64_t n = request.n_queries.n;
    if (s.step != 0) return invalid_argument("[plan_read] the sequence is in the middle of a step");
    if (n < 1 || n > s.length)
      return invalid_argument(str("[plan_read] ", n, " queries for a sequence of ", s.length, " tokens"));
    for (int g = 0; g < n_groups(); ++g) {
      if (windows_[size_t(g)] == 0) continue;
      const int64_t needed_from = std::max<int64_t>(0, s.length - n - windows_[size_t(g)] + 1);
      const int64_t held_from = s.tables[size_t(g)].first_held * options_.block_size;
      if (needed_from < held_from)
        return invalid_argument(str("[plan_read] the queries see keys from position ", needed_from,
                                    ", the window holds them from ", held_from));
    }
    sequences.push_back(&s);
    if (n > kMaxStepTokens - n_queries)
      return invalid_argument(str("[plan_read] more than ", kMaxStepTokens, " queries in one plan"));
    n_queries += n;
    out.sequences.push_back({request.sequence, s.length - n, n});
    out.versions.push_back(s.version);
  }
  fill_arrays(sequences, out);
  return Status();
}

Status CacheCore::check_current(const StepArrays& reading) const {
  for (size_t i = 0; i < reading.sequences.size(); ++i) {
    const SequenceId id = reading.sequences[i].id;
    const auto found = find(id);
    if (!found.ok()) return found.status();
    if ((*found)->version != reading.versions[i])
      return Status(Code::kStale, str("[plan] sequence ", id.index,
                                      " has changed since this plan was made; plan_read makes a new one"));
  }
  return Status();
}

void CacheCore::extend_tables(Sequence& s, int64_t new_length, Orders& orders) {
  const int64_t block_size = options_.block_size;
  bool copied = false;
  for (int g = 0; g < n_groups(); ++g) {
    BlockPool& pool = *pools_[size_t(g)];
    auto& ids = s.tables[size_t(g)].ids;
    if (s.length % block_size != 0) {
      BlockId& tail = ids[size_t(s.length / block_size)];
      if (!pool.is_writable(tail)) {  // copy on write
        const BlockId copy = pool.take();
        orders.copies.push_back({g, tail, copy});
        pool.drop(tail);
        tail = copy;
        if (s.open_entry != PrefixIndex::kNone) index_.set_block(s.open_entry, g, copy);
        copied = true;
      }
    }
    while (int64_t(ids.size()) * block_size < new_length) ids.push_back(pool.take());
  }
  figures_.copies += copied;
}

void CacheCore::fill_arrays(std::span<const Sequence* const> sequences, StepArrays& out) const {
  const int64_t block_size = options_.block_size;
  const size_t n = sequences.size();
  out.seq_lens.resize(n);
  out.query_start_loc.resize(n + 1);
  out.query_start_loc[0] = 0;
  for (size_t i = 0; i < n; ++i) {
    out.seq_lens[i] = int32_t(out.sequences[i].old_length + out.sequences[i].n_new);
    out.query_start_loc[i + 1] = out.query_start_loc[i] + int32_t(out.sequences[i].n_new);
  }
  const size_t n_tokens = size_t(out.query_start_loc[n]);
  out.positions.resize(n_tokens);
  for (size_t i = 0, t = 0; i < n; ++i)
    for (int64_t p = out.sequences[i].old_length; p < out.seq_lens[i]; ++p) out.positions[t++] = int32_t(p);

  out.groups.resize(pools_.size());
  for (size_t g = 0; g < pools_.size(); ++g) {
    StepArrays::Group& group = out.groups[g];
    size_t width = 0;
    for (const Sequence* s : sequences) width = std::max(width, s->tables[g].ids.size());
    group.max_blocks = int64_t(width);
    group.block_tables.resize(n * width);
    group.slot_mapping.resize(n_tokens);
    int64_t* slot = group.slot_mapping.data();
    for (size_t i = 0; i < n; ++i) {
      const auto& ids = sequences[i]->tables[g].ids;
      int32_t* row = group.block_tables.data() + i * width;
      static_assert(sizeof(BlockId) == sizeof(int32_t));
      if (!ids.empty()) std::memcpy(row, ids.data(), ids.size() * sizeof(int32_t));  // kNoBlock is -1 there
      std::fill(row + ids.size(), row + width, -1);
      for (int64_t p = out.sequences[i].old_length; p < out.seq_lens[i];) {  // block by block
        const int64_t block = p / block_size, end = std::min<int64_t>(out.seq_lens[i], (block + 1) * block_size);
        int64_t first = int64_t(ids[size_t(block)]) * block_size + p % block_size;
        for (; p < end; ++p) *slot++ = first++;
      }
    }
  }
}

Result<std::vector<Status>> CacheCore::commit(StepArrays& step, std::span<const Tokens> accepted,
                                              std::vector<Status> rejected) {
  const size_t n = step.sequences.size();
  if (step.step == 0) return invalid_argument("[commit] the step has ended already");
  if (!accepted.empty() && accepted.size() != n)
    return invalid_argument(str("[commit] ", accepted.size(), " accepted counts for ", n, " sequences"));
  for (size_t i = 0; i < accepted.size(); ++i) {
    if (accepted[i].n < 0 || accepted[i].n > step.sequences[i].n_new)
      return invalid_argument(
          str("[commit] ", accepted[i].n, " tokens accepted, the step brought ", step.sequences[i].n_new));
  }
  std::vector<Status> statuses = std::move(rejected);
  statuses.resize(n);
  for (size_t i = 0; i < n; ++i) {
    const StepSequence& part = step.sequences[i];
    Sequence& s = *in_step(part, step.step);
    if (s.released) {
      statuses[i] = Status(Code::kStale, "[commit] the sequence was released during the step");
      end_sequence(part.id.index);
      continue;
    }
    const int64_t n_accepted = !statuses[i].ok() ? 0 : accepted.empty() ? part.n_new : accepted[i].n;
    settle(s, part.old_length + n_accepted);
  }
  step.step = 0;
  return statuses;
}

void CacheCore::abandon(StepArrays& step) {
  if (step.step == 0) return;
  for (const StepSequence& part : step.sequences) {
    Sequence& s = *in_step(part, step.step);
    if (s.released)
      end_sequence(part.id.index);
    else
      settle(s, part.old_length);
  }
  step.step = 0;
}

// A sequence of an open step is always there: release waits for the step's end.
CacheCore::Sequence* CacheCore::in_step(const StepSequence& part, uint64_t step) {
  Sequence& s = sequences_[part.id.index];
  PKV_CHECK(s.live && s.generation == part.id.generation && s.step == step);
  return &s;
}

// Ends a sequence's step at new_length: keys for full blocks, blocks it does not need go back.
void CacheCore::settle(Sequence& s, int64_t new_length) {
  s.step = 0;
  s.length = new_length;
  s.tokens.resize(std::min(s.tokens.size(), size_t(new_length)));
  drop_tail(s, blocks_for(Tokens(new_length), Tokens(options_.block_size)).n);
  index_full_blocks(s);
  sync_open_entry(s);
  give_back_behind_window(s);
}

// The key of the sequence's next full block. Known since start() as long as the sequence is what its prompt said:
// what comes before this block (which an equal parent's key tells), and the block.
Key CacheCore::next_key(const Sequence& s, std::span<const int32_t> tokens) const {
  const size_t block = size_t(s.node_blocks);
  const bool known = block < s.prompt_keys.size() &&
                     (block == 0 || s.prompt_keys[block - 1] == index_.key(s.node)) &&
                     std::ranges::equal(tokens, std::span(s.prompt).subspan(block * tokens.size(), tokens.size()));
  return known ? s.prompt_keys[block] : index_.hash(index_.key(s.node), tokens);
}

void CacheCore::give_key(uint32_t entry, int group, BlockId block) {
  index_.set_block(entry, group, block);
  pools_[size_t(group)]->set_entry(block, entry);
}

void CacheCore::index_full_blocks(Sequence& s) {
  const int64_t block_size = options_.block_size;
  if (!s.store) return;
  while ((s.node_blocks + 1) * block_size <= std::min(s.length, int64_t(s.tokens.size()))) {
    drop_open_entry(s);  // it spoke of the block that is full now
    const auto tokens =
        std::span<const int32_t>(s.tokens).subspan(size_t(s.node_blocks * block_size), size_t(block_size));
    const Key key = next_key(s, tokens);
    uint32_t entry = index_.find(s.node, key, tokens).entry;
    if (entry == PrefixIndex::kNone) entry = index_.add(s.node, key, tokens, PrefixIndex::Kind::kFull);
    for (int g = 0; g < n_groups(); ++g) {
      const BlockId block = s.tables[size_t(g)].ids[size_t(s.node_blocks)];
      // Another block may carry this key already; a key is in one place.
      if (block == kNoBlock || index_.block(entry, g) != kNoBlock || pools_[size_t(g)]->entry(block) != kNoEntry)
        continue;
      give_key(entry, g, block);
      list_keyed(g, block, entry, s.node_blocks);
    }
    index_.pin(entry);
    index_.unpin(s.node);
    s.node = entry;
    ++s.node_blocks;
  }
}

void CacheCore::give_back_behind_window(Sequence& s) {
  for (int g = 0; g < n_groups(); ++g) {
    Table& table = s.tables[size_t(g)];
    const int64_t keep_from = first_kept_block(g, s.length);
    for (; table.first_held < keep_from; ++table.first_held) {
      BlockId& block = table.ids[size_t(table.first_held)];
      if (block != kNoBlock) pools_[size_t(g)]->drop(block);
      block = kNoBlock;
    }
  }
}

// Keeps the sequence's open entry in step with its last, partly filled block.
void CacheCore::sync_open_entry(Sequence& s) {
  const int64_t block_size = options_.block_size;
  const int64_t n_open = s.length % block_size;
  bool fits = is_tracked(s) && n_open > 0;
  for (int g = 0; g < n_groups() && fits; ++g)
    fits = pools_[size_t(g)]->is_writable(s.tables[size_t(g)].ids[size_t(s.node_blocks)]);
  if (!fits) return drop_open_entry(s);
  if (s.open_entry == PrefixIndex::kNone) s.open_entry = index_.add_open(s.node);
  for (int g = 0; g < n_groups(); ++g)
    index_.set_block(s.open_entry, g, s.tables[size_t(g)].ids[size_t(s.node_blocks)]);
  index_.set_open_tokens(
      s.open_entry, std::span<const int32_t>(s.tokens).subspan(size_t(s.node_blocks * block_size), size_t(n_open)));
}

void CacheCore::drop_open_entry(Sequence& s) {
  if (s.open_entry == PrefixIndex::kNone) return;
  for (int g = 0; g < n_groups(); ++g) index_.set_block(s.open_entry, g, kNoBlock);
  index_.remove_if_unused(s.open_entry);
  s.open_entry = PrefixIndex::kNone;
}

// A released sequence leaves its last block as a partial entry, unless somebody else still writes or knows it.
void CacheCore::keep_tail_as_partial(Sequence& s) {
  if (s.open_entry == PrefixIndex::kNone) return;
  for (int g = 0; g < n_groups(); ++g)
    if (!pools_[size_t(g)]->is_writable(index_.block(s.open_entry, g))) return;
  const auto open = index_.tokens(s.open_entry);
  const std::vector<int32_t> tokens(open.begin(), open.end());
  const Key key = index_.hash(index_.key(s.node), tokens);
  if (index_.find(s.node, key, tokens).entry != PrefixIndex::kNone) return;
  const uint32_t entry = index_.add(s.node, key, tokens, PrefixIndex::Kind::kPartial);
  for (int g = 0; g < n_groups(); ++g) {
    const BlockId block = index_.block(s.open_entry, g);
    give_key(entry, g, block);
  }
}

}  // namespace pagedkv
