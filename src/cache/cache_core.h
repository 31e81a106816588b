// Decides: which blocks a sequence holds, what a step takes and gives, which prefixes are reused. Integers only.
//
// One thread. Every public call either does what it says or leaves everything as it was.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cache/block_pool.h"
#include "cache/prefix_index.h"
#include "cache/step_arrays.h"
#include "pagedkv/block_view.h"
#include "pagedkv/cache.h"
#include "pagedkv/status.h"

namespace pagedkv {

inline constexpr int kPrefixReasons = int(PrefixReason::kOff) + 1;

class CacheCore {
 public:
  struct Group {
    BlockPool::Options pool;
    int64_t sliding_window = 0;     // 0: full attention
    BlockSource* source = nullptr;  // must outlive the core
  };
  struct Options {
    int64_t block_size = 16;
    int64_t max_context = 0;  // 0: no bound
    bool prefix_sharing = true;
    int64_t most_keyed = 0;
    Key descriptor{};  // of what makes K and V of equal tokens differ
    PrefixIndex::HashFunction hash = &chain_key;
  };
  struct Figures {
    int64_t sequences = 0, tokens = 0, copies = 0;
    int64_t keyed_passed_over = 0;  // blocks that were not listed, because most_keyed were waiting
    std::array<int64_t, kPrefixReasons> tokens_by_reason{};  // [kHit]: reused; others: not reused, and why
  };

  CacheCore(const Options& options, const std::vector<Group>& groups);
  // Commits every group's floor. Errors: those of the sources.
  Status open();

  Key root_of(std::string_view name_space) const { return root_key(options_.descriptor, name_space); }
  // The keys of a prompt's full blocks, of which `known` are the first.
  std::vector<Key> hash_prompt(std::span<const int32_t> prompt, std::string_view name_space,
                               std::vector<Key> known = {}) const;
  // Looks match.keys up: match.cached and match.entries become those of now.
  void look_up(std::span<const int32_t> prompt, PrefixMatch& match) const;
  // Blocks of a match in the main group that nobody holds.
  int64_t idle_blocks(const PrefixMatch& match) const;

  // `keys`: of the prompt's full blocks. `orders`: what must be carried out before anything else.
  Result<Started> start(std::span<const int32_t> prompt, std::string_view name_space, std::span<const Key> keys,
                        const StartOptions& options, Orders& orders);
  Result<SequenceId> fork(SequenceId id);
  Status truncate(SequenceId id, int64_t new_length);
  Status release(SequenceId id);
  Result<int64_t> length(SequenceId id) const;
  Result<int64_t> blocks_held(SequenceId id, int group) const;
  // Table of one group: the block of each block_size positions, kNoBlock where a window gave it back.
  Result<std::span<const BlockId>> table(SequenceId id, int group) const;
  void clear_cached();
  Status raise_floor(int64_t blocks);
  // The group's floor becomes all that has memory now (holes are filled).
  Status keep_committed(int group);

  // cache_tiers.cc. `prompt` and `keys` as for start().
  std::vector<KeyedBlock> take_keyed();
  Status let_go(int group, BlockId block);
  Result<Restore> begin_restore(std::span<const int32_t> prompt, const PrefixMatch& match, int64_t n);
  int64_t end_restore(const Restore& restore, std::span<const int32_t> prompt, const PrefixMatch& match,
                      const std::vector<bool>& filled);

  // Fills `out` for these requests, or changes nothing.
  Status reserve(std::span<const StepRequest> requests, StepArrays& out);
  // Fills `out` with queries at the last positions of sequences; nothing is taken.
  Status read(std::span<const ReadRequest> requests, StepArrays& out) const;
  // kStale when a sequence that `read` described has changed since, or is gone: its blocks may be others' now.
  Status check_current(const StepArrays& reading) const;
  // `rejected` holds a not-ok status for sequences whose rows must not be accepted; same size as the step.
  Result<std::vector<Status>> commit(StepArrays& step, std::span<const Tokens> accepted,
                                     std::vector<Status> rejected);
  void abandon(StepArrays& step);

  // The group whose blocks `num_blocks` and capacity messages count: the first with full attention, else the first.
  int main_group() const { return main_group_; }
  const BlockPool& pool(int group) const { return *pools_[size_t(group)]; }
  int n_groups() const { return int(pools_.size()); }
  Figures figures() const;
  std::vector<BlockView> block_views(int group) const;
  const PrefixIndex& index() const { return index_; }
  int64_t last_step() const { return int64_t(last_step_); }
  Status verify() const;

 private:
  struct Table {
    std::vector<BlockId> ids;  // logical block -> block
    int64_t first_held = 0;    // blocks before it were given back behind a window
  };
  struct Sequence {
    uint32_t generation = 0;
    bool live = false;
    bool released = false;        // during a step: its blocks stay until the step ends, the handle is stale now
    bool store = false;           // later prompts may reuse its blocks
    int64_t length = 0;           // committed tokens
    uint64_t version = 0;         // new with each step and truncation; nothing is read in the middle of a step
    uint64_t step = 0;            // the open step, 0: none
    std::vector<int32_t> tokens;  // ids of the leading tokens; shorter than length once rows without ids came
    uint32_t node = PrefixIndex::kNone;  // pinned: entry of the last indexed full block, or the root
    int64_t node_blocks = 0;             // full blocks up to node
    uint32_t open_entry = PrefixIndex::kNone;
    std::vector<Table> tables;    // per group
    std::vector<int32_t> prompt;  // as start() got it, with its keys: blocks with these tokens are not hashed again
    std::vector<Key> prompt_keys;
  };
  struct Match {
    std::vector<uint32_t> entries;  // of the full blocks that hit
    PrefixReason reason = PrefixReason::kNew;
  };

  using Problem = std::function<void(const std::string&)>;
  void verify_tables(const Problem& problem) const;
  void verify_sequences(const Problem& problem) const;
  void verify_index(const Problem& problem) const;
  Result<Sequence*> find(SequenceId id);
  Result<const Sequence*> find(SequenceId id) const;
  SequenceId new_sequence();
  int64_t first_needed_block(int group, int64_t length) const;
  int64_t first_kept_block(int group, int64_t length) const;
  int64_t window_limit(std::span<const uint32_t> entries, int64_t n) const;
  Match match(std::span<const int32_t> prompt, std::span<const Key> keys, uint32_t root) const;
  void take_over(Sequence& s, std::span<const uint32_t> entries);
  void copy_partial(Sequence& s, std::span<const int32_t> rest, Orders& orders, PrefixReason& reason,
                    int64_t& reused);
  Status check_length(int64_t length, int64_t n_new) const;
  Result<std::vector<Sequence*>> begin_step(std::span<const StepRequest> requests, StepArrays& out);
  struct NoRoom {
    int group;
    int64_t have;  // free or cached
    Status refusal;
  };
  std::optional<NoRoom> free_blocks(std::span<const int64_t> need);
  Status make_room(std::span<Sequence* const> sequences, std::span<const StepSequence> steps);
  int64_t blocks_to_take(int group, std::span<Sequence* const> sequences,
                         std::span<const StepSequence> steps) const;
  void extend_tables(Sequence& s, int64_t new_length, Orders& orders);
  void fill_arrays(std::span<const Sequence* const> sequences, StepArrays& out) const;
  void drop_tail(Sequence& s, int64_t keep_blocks);
  void give_back_behind_window(Sequence& s);
  Key next_key(const Sequence& s, std::span<const int32_t> tokens) const;
  void give_key(uint32_t entry, int group, BlockId block);  // the entry's block of the group is this one
  void index_full_blocks(Sequence& s);
  void list_keyed(int group, BlockId block, uint32_t entry, int64_t depth);
  void hold_outside(int group, BlockId block);
  void drop_outside(int group, BlockId block);
  void sync_open_entry(Sequence& s);
  void drop_open_entry(Sequence& s);
  void keep_tail_as_partial(Sequence& s);
  void end_sequence(uint32_t index);
  Sequence* in_step(const StepSequence& part, uint64_t step);
  void settle(Sequence& s, int64_t new_length);
  bool is_tracked(const Sequence& s) const {
    return s.store && int64_t(s.tokens.size()) >= s.length && s.node_blocks == s.length / options_.block_size;
  }

  Options options_;
  std::vector<std::unique_ptr<BlockPool>> pools_;  // per group
  std::vector<int64_t> windows_;
  int main_group_ = 0;
  PrefixIndex index_;
  std::vector<Sequence> sequences_;
  std::vector<uint32_t> free_sequences_;
  uint64_t last_step_ = 0;
  uint64_t last_version_ = 0;
  Figures figures_;
  std::vector<KeyedBlock> keyed_;                     // not taken yet
  std::vector<std::map<BlockId, uint32_t>> outside_;  // per group: holders that are no sequences
};

}  // namespace pagedkv
