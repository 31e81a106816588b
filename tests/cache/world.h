// A cache without floats: blocks hold one number a slot, the hash of the tokens up to there, so that a block that
// is lent, copied, evicted or reused wrongly shows at once.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "cache/cache_core.h"

namespace pagedkv {

// Memory of one group: commits can be made to fail; what is not committed must not be touched.
class FakeSource : public BlockSource {
 public:
  FakeSource(int64_t block_size, int64_t extent_blocks, int64_t max_blocks)
      : block_size_(block_size),
        extent_blocks_(extent_blocks),
        values_(size_t(block_size * max_blocks)),
        committed_(size_t((max_blocks + extent_blocks - 1) / extent_blocks)) {}

  Status commit(int64_t extent) override {
    ++commit_calls;
    if (fail_after >= 0 && fail_after-- == 0) return Status(Code::kNoMemory, "injected");
    EXPECT_FALSE(committed_[size_t(extent)]) << "extent " << extent << " committed twice";
    committed_[size_t(extent)] = true;
    ++n_committed_;
    return Status();
  }
  void decommit(int64_t extent) override {
    EXPECT_TRUE(committed_[size_t(extent)]);
    committed_[size_t(extent)] = false;
    --n_committed_;
    std::fill_n(
        values_.begin() + extent * extent_blocks_ * block_size_,
        std::min(extent_blocks_ * block_size_, int64_t(values_.size()) - extent * extent_blocks_ * block_size_), 0);
  }
  void copy(BlockId source, BlockId destination) {
    for (int64_t i = 0; i < block_size_; ++i)
      at(int64_t(destination) * block_size_ + i) = at(int64_t(source) * block_size_ + i);
  }
  int64_t bytes_committed() const override { return n_committed_ * extent_blocks_; }
  int64_t blocks_left_by_budget() const override { return int64_t(values_.size()); }

  uint64_t& at(int64_t slot) {
    EXPECT_TRUE(committed_[size_t(slot / block_size_ / extent_blocks_)]) << "slot " << slot << " has no memory";
    return values_[size_t(slot)];
  }

  int64_t fail_after = -1;  // commits that still succeed; -1: all
  int64_t commit_calls = 0;

 private:
  int64_t block_size_, extent_blocks_, n_committed_ = 0;
  std::vector<uint64_t> values_;
  std::vector<bool> committed_;
};

struct WorldOptions {
  int64_t blocks = 4;
  int64_t block_size = 4;
  std::vector<int64_t> windows = {0};  // one group each
  int64_t floor = -1;                  // -1: all blocks from the start
  int64_t extent = 1;
  bool sharing = true;
  int64_t most_keyed = 0;
  PrefixIndex::HashFunction hash = &chain_key;
};

inline std::vector<int32_t> tokens(int32_t from, int32_t to) {
  std::vector<int32_t> list(size_t(to - from));
  std::iota(list.begin(), list.end(), from);
  return list;
}

class World {
 public:
  explicit World(const WorldOptions& options) : options_(options) {
    std::vector<CacheCore::Group> groups;
    for (int64_t window : options.windows) {
      sources_.push_back(std::make_unique<FakeSource>(options.block_size, options.extent, options.blocks));
      groups.push_back({.pool = {.max_blocks = options.blocks,
                                 .floor_blocks = options.floor < 0 ? options.blocks : options.floor,
                                 .extent_blocks = options.extent,
                                 .image_bytes = 1,
                                 .extent_bytes = options.extent},
                        .sliding_window = window,
                        .source = sources_.back().get()});
    }
    core = std::make_unique<CacheCore>(CacheCore::Options{.block_size = options.block_size,
                                                          .prefix_sharing = options.sharing,
                                                          .most_keyed = options.most_keyed,
                                                          .hash = options.hash},
                                       groups);
    EXPECT_TRUE(core->open().ok());
  }

  // Opens a sequence for `prompt` and returns how many of its tokens were reused; their content is checked.
  int64_t start(const std::string& name, const std::vector<int32_t>& prompt, const StartOptions& options = {}) {
    return start(name, prompt, core->hash_prompt(prompt, options.name_space), options);
  }
  // The same with keys that somebody else made.
  int64_t start(const std::string& name, const std::vector<int32_t>& prompt, std::span<const Key> keys,
                const StartOptions& options = {}) {
    Orders orders;
    auto started = core->start(prompt, options.name_space, keys, options, orders);
    carry_out(orders);
    EXPECT_TRUE(started.ok()) << started.status().message();
    ids[name] = started->id;
    reason = started->reason;
    history[name].assign(prompt.begin(), prompt.begin() + started->reused.n);
    expect_content(name);
    return started->reused.n;
  }
  // Computes what start() did not reuse.
  int64_t prefill(const std::string& name, const std::vector<int32_t>& prompt, const StartOptions& options = {}) {
    const int64_t reused = start(name, prompt, options);
    const std::vector<int32_t> rest(prompt.begin() + reused, prompt.end());
    if (!rest.empty()) {
      EXPECT_TRUE(append(name, rest).ok());
    }
    return reused;
  }
  Status reserve(const std::vector<std::pair<std::string, std::vector<int32_t>>>& batch, StepArrays& step) {
    std::vector<StepRequest> requests;
    for (const auto& [name, list] : batch) requests.push_back({ids[name], list});
    const Status status = core->reserve(requests, step);
    if (status.ok()) carry_out(step.orders);
    return status;
  }
  void carry_out(const Orders& orders) {
    for (const CopyOrder& copy : orders.copies) sources_[size_t(copy.group)]->copy(copy.source, copy.destination);
  }
  // Writes every new slot of a step.
  void compute(const StepArrays& step, const std::vector<std::pair<std::string, std::vector<int32_t>>>& batch) {
    for (size_t i = 0; i < batch.size(); ++i) {
      std::vector<int32_t> all = history[batch[i].first];
      for (size_t t = 0; t < batch[i].second.size(); ++t) {
        all.push_back(batch[i].second[t]);
        const size_t token = size_t(step.query_start_loc[i]) + t;
        for (size_t g = 0; g < sources_.size(); ++g)
          sources_[g]->at(step.groups[g].slot_mapping[token]) = content(all);
      }
    }
  }
  // One step of one sequence; `accept` of its tokens count (-1: all).
  Status append(const std::string& name, const std::vector<int32_t>& list, int64_t accept = -1) {
    StepArrays step;
    if (Status status = reserve({{name, list}}, step); !status.ok()) return status;
    compute(step, {{name, list}});
    const Tokens accepted(accept < 0 ? int64_t(list.size()) : accept);
    auto statuses = core->commit(step, {&accepted, 1}, {});
    EXPECT_TRUE(statuses.ok() && statuses->front().ok());
    history[name].insert(history[name].end(), list.begin(), list.begin() + accepted.n);
    expect_content(name);
    return Status();
  }
  void fork(const std::string& name, const std::string& child) {
    auto id = core->fork(ids[name]);
    ASSERT_TRUE(id.ok());
    ids[child] = *id;
    history[child] = history[name];
  }
  Status truncate(const std::string& name, int64_t length) {
    const Status status = core->truncate(ids[name], length);
    if (status.ok()) history[name].resize(size_t(length));
    return status;
  }
  void close(std::string name) {
    EXPECT_TRUE(core->release(ids[name]).ok());
    ids.erase(name);
    history.erase(name);
  }

  // Every slot that the sequence still holds carries the hash of its own tokens.
  void expect_content(const std::string& name) {
    const auto& own = history[name];
    ASSERT_EQ(core->length(ids[name]).value(), int64_t(own.size()));
    std::vector<uint64_t> hashes;
    uint64_t hash = kSeed;
    for (int32_t token : own) hashes.push_back(hash = mix(hash, token));
    for (int g = 0; g < core->n_groups(); ++g) {
      const auto table = core->table(ids[name], g).value();
      const int64_t window = options_.windows[size_t(g)];
      const int64_t from = window == 0 ? 0 : std::max<int64_t>(0, int64_t(own.size()) - window + 1);
      for (int64_t p = from; p < int64_t(own.size()); ++p) {
        const BlockId block = table[size_t(p / options_.block_size)];
        ASSERT_NE(block, kNoBlock) << name << " lost position " << p << " in group " << g;
        ASSERT_EQ(sources_[size_t(g)]->at(int64_t(block) * options_.block_size + p % options_.block_size),
                  hashes[size_t(p)])
            << name << " reads foreign content at position " << p << " of " << own.size() << " in group " << g;
      }
    }
  }
  // Row `i` of a plan names, from its first query's window on, slots with the hashes of this history.
  void expect_reads(const StepArrays& plan, size_t i, const std::vector<int32_t>& own) {
    ASSERT_EQ(plan.seq_lens[i], int64_t(own.size()));
    std::vector<uint64_t> hashes;
    uint64_t hash = kSeed;
    for (int32_t token : own) hashes.push_back(hash = mix(hash, token));
    for (size_t g = 0; g < sources_.size(); ++g) {
      const int64_t window = options_.windows[g];
      const int64_t from = window == 0 ? 0 : std::max<int64_t>(0, plan.sequences[i].old_length - window + 1);
      const StepArrays::Group& group = plan.groups[g];
      for (int64_t p = from; p < int64_t(own.size()); ++p) {
        const int64_t block = group.block_tables[i * size_t(group.max_blocks) + size_t(p / options_.block_size)];
        ASSERT_GE(block, 0);
        ASSERT_EQ(sources_[g]->at(block * options_.block_size + p % options_.block_size), hashes[size_t(p)])
            << "a plan reads foreign content at position " << p << " in group " << g;
      }
    }
  }
  const WorldOptions& options() const { return options_; }
  std::vector<uint64_t> image(int group, BlockId block) {
    std::vector<uint64_t> out;
    for (int64_t i = 0; i < options_.block_size; ++i)
      out.push_back(sources_[size_t(group)]->at(int64_t(block) * options_.block_size + i));
    return out;
  }
  void set_image(int group, BlockId block, const std::vector<uint64_t>& image) {
    for (int64_t i = 0; i < options_.block_size; ++i)
      sources_[size_t(group)]->at(int64_t(block) * options_.block_size + i) = image[size_t(i)];
  }
  void expect_sound() {
    const Status status = core->verify();
    ASSERT_TRUE(status.ok()) << status.message();
    for (int g = 0; g < core->n_groups(); ++g) {
      const auto& c = core->pool(g).counts();
      ASSERT_EQ(c.free + c.open + c.full + c.shared + c.cached, c.total);
      ASSERT_LE(c.total, options_.blocks);
    }
  }

  const BlockPool::Counts& counts(int group = 0) const { return core->pool(group).counts(); }
  int64_t live(int group = 0) const { return counts(group).open + counts(group).full + counts(group).shared; }
  int64_t held(const std::string& name, int group = 0) { return core->blocks_held(ids[name], group).value(); }
  FakeSource& source(int group = 0) { return *sources_[size_t(group)]; }

  std::unique_ptr<CacheCore> core;
  std::map<std::string, SequenceId> ids;
  std::map<std::string, std::vector<int32_t>> history;
  PrefixReason reason = PrefixReason::kHit;  // of the last start

 private:
  static constexpr uint64_t kSeed = 0x9e3779b97f4a7c15u;
  static uint64_t mix(uint64_t hash, int32_t token) {
    hash = (hash ^ uint32_t(token)) * 0xbf58476d1ce4e5b9u;
    return hash ^ (hash >> 29);
  }
  static uint64_t content(const std::vector<int32_t>& list) {
    uint64_t hash = kSeed;
    for (int32_t token : list) hash = mix(hash, token);
    return hash;
  }

  WorldOptions options_;
  std::vector<std::unique_ptr<FakeSource>> sources_;
};

}  // namespace pagedkv
