// The paged KV cache: blocks, sequences, and the attention that reads them.
//
//   auto cache = Cache::create({.groups = {...}});
//   auto seq = (*cache)->start(prompt);                       // reuses cached blocks of the same prefix
//   auto plan = (*cache)->reserve({{seq->id, new_tokens}});   // takes every block the step needs, or none
//   for each layer: append(plan, ...); attend(args); merge(args);
//   (*cache)->commit(std::move(*plan));                       // lengths grow, full blocks get their keys
//
// Threads: one thread for everything that changes the cache (start ... commit). append, attend and merge of one
// plan may run on several threads at once, each with its own Part. stats() and verify(): the changing thread.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/attention.h"
#include "pagedkv/block_view.h"
#include "pagedkv/export.h"
#include "pagedkv/layout.h"
#include "pagedkv/prefix.h"
#include "pagedkv/stats.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

struct CacheOptions {
  std::vector<GroupSpec> groups;
  Tokens block_size{16};
  // Blocks of the full-attention group that exist from the start; the pool never shrinks below them.
  Blocks num_blocks{1024};
  // Grow past num_blocks on demand, by extents, up to kv_memory. Off: num_blocks is all there is.
  bool dynamic = true;
  // Upper bound of committed bytes over all groups. 0: half of min(RAM, cgroup limit), read once at creation.
  Bytes kv_memory{0};
  // Longest sequence, at most kMaxTokens; 0: no bound but memory.
  Tokens max_context{0};
  // Longest run of tokens one sequence brings to one step; sizes the floor of window groups.
  Tokens longest_chunk{512};
  // Sequences that run at once; sizes the floor of window groups.
  int64_t max_sequences = 1;
  ArenaOrder arena = ArenaOrder::kBlockMajor;
  // Give finished blocks keys, so that later prompts with the same prefix reuse them.
  bool prefix_sharing = true;
  // Blocks that may wait to be put into a tier (Cache::take_keyed); further ones are passed over, and counted.
  int64_t most_keyed = 0;
  // What else makes K and V differ: model, adapter, RoPE setting, products of matrices. Part of every key.
  std::string fingerprint;
  // How quantized formats are multiplied. Part of every key: deeper layers' K and V depend on it.
  QueryPath query_path = QueryPath::kAuto;
  // Query heads for each KV head, where they are known by now: kAuto may choose better. The most of all layers;
  // 0: not known, which counts as many. Calls may bring any number.
  int64_t q_heads_per_kv_head = 0;
  // Kernel entry by name (scalar, neon, avx2, avx512, avx512_vnni); empty: PAGEDKV_ISA if set, else the best of
  // this machine.
  std::string isa;
};

// The kernel entries of this build, best first; supported: by this CPU and its operating system.
struct IsaEntry {
  std::string name;
  bool supported = false;
};
PKV_API std::vector<IsaEntry> isa_entries();
// The entry that a cache made without CacheOptions::isa runs. Errors: kInvalidArgument when PAGEDKV_ISA names none
// that runs here.
struct IsaChoice {
  std::string name;
  bool by_environment = false;  // PAGEDKV_ISA, else the best of this machine
};
PKV_API Result<IsaChoice> default_isa();

// New tokens of one sequence in a step. `tokens` may be empty: then n_tokens rows without ids are appended, and
// the sequence stops being shareable from there on.
struct StepRequest {
  SequenceId sequence;
  std::span<const int32_t> tokens;
  Tokens n_tokens{0};  // used when `tokens` is empty
};

// Queries at the last positions of a sequence, over what is stored (see Cache::plan_read).
struct ReadRequest {
  SequenceId sequence;
  Tokens n_queries{1};
};

// A full block of a chain that got its key: it never changes from then on.
struct KeyedBlock {
  int group = 0;
  BlockId block{};
  uint32_t depth = 0;  // blocks before it in its chain
  PrefixKey key{}, parent{};
  std::vector<int32_t> tokens = {};
};

// Blocks of a prompt that a tier's images are written into (see Cache::begin_restore).
struct Restore {
  struct Place {
    int group = 0;
    BlockId block{};
    int64_t index = 0;  // of the prompt's blocks
  };
  std::vector<Place> places = {};  // to be filled
  std::vector<Place> kept = {};    // there already: they must not make room for the others
};

// One group's integer arrays of a step, read-only. Names and shapes are those of vLLM's metadata.
struct GroupPlan {
  int64_t max_blocks = 0;                 // width of a table row
  std::span<const int32_t> block_tables;  // [n_sequences, max_blocks], -1 where nothing is held
  std::span<const int64_t> slot_mapping;  // [n_tokens] slot of each new token
};

// The read-only description of one step; made by Cache::reserve, ended by Cache::commit. One that is dropped ends
// its step without accepting anything. A plan that was moved from is empty, and every call of a Cache refuses it.
// Threads: a plan that writes is ended by the thread that changes the cache. It may outlive the cache.
class PKV_API StepPlan {
 public:
  StepPlan(StepPlan&&) noexcept;
  StepPlan& operator=(StepPlan&&) noexcept;
  ~StepPlan();
  void abandon();  // now, instead of at its end

  int64_t n_sequences() const;
  int64_t n_tokens() const;
  std::span<const int32_t> seq_lens() const;         // [n_sequences] length after the new tokens
  std::span<const int32_t> query_start_loc() const;  // [n_sequences + 1]
  std::span<const int32_t> positions() const;        // [n_tokens] position of each new token in its sequence
  // Requires: 0 <= group < groups of the cache (debug builds check; others return an empty plan).
  GroupPlan group(int group) const;

 private:
  friend class Cache;
  struct Impl;
  explicit StepPlan(std::unique_ptr<Impl> impl);
  const Impl& impl() const;
  std::unique_ptr<Impl> impl_;
};

class PKV_API Cache {
 public:
  // Errors: kInvalidArgument (shape, sizes past their limits, head counts, unknown ISA), kCapacity (num_blocks
  // exceed kv_memory), kNoMemory (no address space or memory).
  static Result<std::unique_ptr<Cache>> create(CacheOptions options);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // --- sequences -------------------------------------------------------------------------------------------
  // What of a prompt sits in whole cached blocks now. Nothing changes, and nothing is counted.
  PrefixMatch match(std::span<const int32_t> prompt, std::string_view name_space = {}) const;
  // The same for a prompt that was looked up before, as it was or up to some length: hashes only what is new.
  PrefixMatch match(std::span<const int32_t> prompt, PrefixMatch earlier) const;
  // Opens a sequence and takes over the cached blocks of the longest known prefix of `prompt`: whole blocks by
  // reference, then part of one block by copy. The caller computes prompt[reused ..]. Never fails for lack of room.
  // With a match of the prompt, also an old one, nothing is hashed; another prompt's finds nothing.
  // Errors: kInvalidArgument (longer than max_context).
  Result<Started> start(std::span<const int32_t> prompt, const StartOptions& options = {});
  Result<Started> start(std::span<const int32_t> prompt, const PrefixMatch& match,
                        const StartOptions& options = {});
  // A second sequence with the same content; blocks are shared until one of the two writes.
  Result<SequenceId> fork(SequenceId sequence);
  // Shortens to new_length. Errors: kInvalidArgument past the end or behind what a window group still holds;
  // the sequence is then unchanged.
  Status truncate(SequenceId sequence, Tokens new_length);
  // Ends the sequence, also in the middle of a step. Keyed blocks stay cached.
  Status release(SequenceId sequence);
  Result<Tokens> length(SequenceId sequence) const;
  // Blocks a sequence holds in one group.
  Result<Blocks> blocks_held(SequenceId sequence, int group = 0) const;
  // Drops every cached block.
  void clear_cached();
  // Commits memory for `tokens` in all in the full-attention group, and keeps it. Errors: kCapacity.
  Status grow_to_capacity(Tokens tokens);
  // Keeps what is committed now until the cache ends, so that views of it can be read at any time. Returns the
  // blocks of `group` that such a view may touch: ids below that number. Errors: kCapacity.
  Result<Blocks> keep_committed(int group);

  // --- tiers -----------------------------------------------------------------------------------------------
  // The blocks that got a key since the last call, in the order in which they did. Each stays, whoever else lets it
  // go, until let_go.
  std::vector<KeyedBlock> take_keyed();
  // The key above a first block's.
  PrefixKey root(std::string_view name_space = {}) const;
  // Errors: kInvalidArgument when it is not held so.
  Status let_go(const KeyedBlock& block);
  // A block's image, image_bytes(group) long. Any thread, while the block is held by take_keyed or by a Restore.
  void read_image(int group, BlockId block, std::span<std::byte> image) const;
  void write_image(int group, BlockId block, std::span<const std::byte> image);
  // Takes what the first `n` blocks of a prompt lack in the pool: every block of full attention, and those that a
  // window's end needs. Errors: kInvalidArgument (more than the match has keys), kCapacity, kNoMemory: nothing
  // changed.
  Result<Restore> begin_restore(std::span<const int32_t> prompt, const PrefixMatch& match, Blocks n);
  // Those that were filled become cached blocks, as far as the chain reaches without a gap; the others go back.
  //   filled  [restore.places]
  // Returns the prompt's leading tokens that are cached then.
  Tokens end_restore(Restore&& restore, std::span<const int32_t> prompt, const PrefixMatch& match,
                     const std::vector<bool>& filled);

  // --- one step --------------------------------------------------------------------------------------------
  // Takes the blocks for all requests, in all groups, or changes nothing. A block that is shared or keyed is
  // copied before its sequence writes into it. Nothing after this can fail for lack of room.
  // Errors: kCapacity (`need 214 tokens (14 blocks), have 64 tokens (4 blocks)`), kNoMemory (the system refused
  // what the pool wanted to grow by), kStale, kInvalidArgument.
  Result<StepPlan> reserve(std::span<const StepRequest> requests);

  // Writes the new rows of one layer into the slots that `plan` names, quantizing if the group does.
  // K already carries its rotary embedding. NaN and infinity are flagged in the plan (see commit).
  // Errors: kInvalidArgument (layer, plan, part).
  // Source: PagedAttention, arXiv 2309.06180, section 4.1.
  Status append(StepPlan& plan, int layer, const KvRows& k, const KvRows& v, Part part = {});
  // Attention of the new tokens over everything stored for their sequences, including rows of this step; partial
  // results go to the scratch. All parts of append come before, all parts of merge after.
  // Errors: kInvalidArgument (layer, plan, part, arguments), kStale (see plan_read).
  Status attend(const AttendArgs& args, Part part = {});
  // Joins the partial results into args.out and args.lse. Errors: those of attend.
  Status merge(const AttendArgs& args, Part part = {});
  // Scratch for attend and merge of any layer of this plan, for up to n_parts parts and num_q_heads query heads (0:
  // as many as KV heads). 0 for a plan that attend would refuse. Requires: n_parts >= 1, num_q_heads in range.
  Bytes scratch_bytes(const StepPlan& plan, int n_parts, int64_t num_q_heads = 0) const;

  // Ends the step: each sequence grows by its accepted tokens (default: all of them), full blocks get their
  // keys, blocks behind a window or beyond the accepted length are given back.
  //   accepted  [plan.n_sequences()] or empty
  // Returns one Status per sequence: kNotFinite (the sequence keeps its old length), kStale (released meanwhile).
  // Errors of the call itself: kInvalidArgument (accepted counts), nothing changed, the plan included.
  Result<std::vector<Status>> commit(StepPlan&& plan, std::span<const Tokens> accepted = {});
  // What commit would reject now, one Status per sequence: kNotFinite where append met NaN or infinity. For callers
  // that keep a step whole or not at all. Errors: kInvalidArgument (plan).
  Result<std::vector<Status>> faults(const StepPlan& plan) const;
  // A plan that only reads: queries at each sequence's last n_queries positions over what is stored. It takes no
  // blocks and is never committed; after the next call that changes one of its sequences it is refused as kStale.
  // Errors: kStale, kInvalidArgument (more queries than tokens, or a window has dropped keys they see).
  Result<StepPlan> plan_read(std::span<const ReadRequest> requests) const;

  // --- views and figures -----------------------------------------------------------------------------------
  const CacheOptions& options() const;
  // Views of one layer's tensors. Errors: kInvalidArgument.
  Result<LayerTensors> tensors(int layer) const;
  // Decodes the stored rows of one sequence: k, v as [length, num_kv_heads, head_dim]. For interoperability and
  // tests only; counted in dense_materializations. Errors: kInvalidArgument when a window has dropped rows.
  struct Dense {
    std::vector<float> k, v;
  };
  Result<Dense> read_dense(SequenceId sequence, int layer) const;
  // The same for one sequence of a plan (by its place there), from position `first` on, rows of this step included,
  // into the caller's memory. Row of (position, KV head): data + (position - first) * token_stride + head *
  // head_stride, strides in elements. Errors: kInvalidArgument (layer, plan, place, first, or a window has dropped
  // rows from there on).
  struct DenseRows {
    float* data = nullptr;
    int64_t token_stride = 0, head_stride = 0;
  };
  Status read_dense(const StepPlan& plan, int64_t place, int layer, Tokens first, const DenseRows& k,
                    const DenseRows& v) const;

  // Bytes of one block of a group, padding included. Requires, here and wherever no Status can say so: the group is
  // one of the cache (debug builds check; others return 0, kF32 or nothing).
  Bytes image_bytes(int group) const;
  // Most tokens the full-attention group can ever hold, by num_blocks or kv_memory: in whole extents, beside the
  // floors of the other groups.
  Tokens capacity() const;
  // Tokens that fit in what is committed now.
  Tokens committed_capacity() const;
  // Tokens that could be reserved now, if the system gives what kv_memory allows: free, cached and still to be
  // grown.
  Tokens available() const;
  // The same once start() has taken this match over: its blocks that nobody holds count as available until then.
  Tokens available_beside(const PrefixMatch& match) const;
  // The path that a group's attention takes: kInt8 if K or V is multiplied as codes, else kF32.
  QueryPath query_path(int group = 0) const;
  std::string_view isa() const;  // the kernel entry that runs, chosen at creation
  // SHA-256 over all that makes a block's bytes and what they mean: caches with equal ones may exchange blocks.
  std::array<uint8_t, 32> descriptor() const;
  // `resident`: also bytes_resident, which asks the kernel for every page (milliseconds a GB); else it is 0.
  Stats stats(bool resident = true) const;
  BlockViews block_views(int group = 0) const;
  // Walks every invariant of blocks, tables, keys and counters. kInternal names the first broken one.
  Status verify() const;

 private:
  struct Impl;
  explicit Cache(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;  // plans know whether it is still there
};

}  // namespace pagedkv
