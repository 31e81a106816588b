// A cache with real kernels, fed with rows that depend on a token's history alone, and checked against attention in
// double over what is stored.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pagedkv/cache.h"
#include "pagedkv/scratch.h"

namespace pagedkv {

struct DeskOptions {
  int64_t heads_q = 6, heads_kv = 2, dk = 64, dv = 64;
  KvQuantConfig formats;
  int64_t window = 0;
  int layers = 2;
  int64_t block_size = 16, num_blocks = 64;
  bool dynamic = true, sharing = true;
  int64_t most_keyed = 0;
  ArenaOrder arena = ArenaOrder::kBlockMajor;
  QueryPath query_path = QueryPath::kAuto;
  std::string isa;
  Bytes kv_memory{int64_t{256} << 20};
  int threads = 1;
};

using Outputs = std::vector<std::vector<float>>;  // per layer, [n_tokens, heads_q, dv]

class Desk {
 public:
  explicit Desk(const DeskOptions& options) : o(options) {
    GroupSpec group{.shape = {o.heads_kv, o.dk, o.dv, o.formats}, .sliding_window = o.window};
    for (int l = 0; l < o.layers; ++l) group.layers.push_back(l);
    auto made = Cache::create({.groups = {group},
                               .block_size = Tokens(o.block_size),
                               .num_blocks = Blocks(o.num_blocks),
                               .dynamic = o.dynamic,
                               .kv_memory = o.kv_memory,
                               .longest_chunk = Tokens(64),
                               .max_sequences = 8,
                               .arena = o.arena,
                               .prefix_sharing = o.sharing,
                               .most_keyed = o.most_keyed,
                               .query_path = o.query_path,
                               .isa = o.isa});
    EXPECT_TRUE(made.ok()) << made.status().message();
    cache = std::move(*made);
  }

  // The new rows of a sequence's tokens: equal histories give equal rows.
  void rows(const std::vector<int32_t>& history, size_t n_new, int layer, std::vector<float>& k,
            std::vector<float>& v, std::vector<float>& q) const {
    uint64_t hash = 1469598103934665603u + uint64_t(layer);
    for (size_t t = 0; t < history.size(); ++t) {
      hash = (hash ^ uint32_t(history[t])) * 1099511628211u;
      if (t + n_new < history.size()) continue;
      std::mt19937 random(uint32_t(hash ^ (hash >> 32)));
      std::normal_distribution<float> normal;
      for (int64_t i = 0; i < o.heads_kv * o.dk; ++i) k.push_back(normal(random));
      for (int64_t i = 0; i < o.heads_kv * o.dv; ++i) v.push_back(normal(random));
      for (int64_t i = 0; i < o.heads_q * o.dk; ++i) q.push_back(normal(random));
    }
  }

  using Batch = std::vector<std::pair<std::string, std::vector<int32_t>>>;

  // One step; outputs are cut per sequence and returned by name.
  std::map<std::string, Outputs> step(const Batch& batch) {
    std::vector<StepRequest> requests;
    for (const auto& [name, list] : batch) requests.push_back({.sequence = ids[name], .tokens = list});
    auto plan = cache->reserve(requests);
    last = plan.status();
    if (!plan.ok()) return {};
    Scratch scratch;
    std::map<std::string, Outputs> outputs;
    for (int layer = 0; layer < o.layers; ++layer) {
      std::vector<float> k, v, q;
      for (const auto& [name, list] : batch) {
        auto history = histories[name];
        history.insert(history.end(), list.begin(), list.end());
        rows(history, list.size(), layer, k, v, q);
      }
      std::vector<float> out(size_t(plan->n_tokens() * o.heads_q * o.dv), NAN);
      const AttendArgs args{.plan = *plan,
                            .layer = layer,
                            .num_q_heads = o.heads_q,
                            .q = q.data(),
                            .out = out.data(),
                            .scratch = *scratch.get(cache->scratch_bytes(*plan, o.threads, o.heads_q))};
      parts([&](Part part) { EXPECT_TRUE(cache->append(*plan, layer, {k.data()}, {v.data()}, part).ok()); });
      parts([&](Part part) { EXPECT_TRUE(cache->attend(args, part).ok()); });
      parts([&](Part part) { EXPECT_TRUE(cache->merge(args, part).ok()); });
      auto at = out.begin();
      for (const auto& [name, list] : batch) {
        const auto end = at + int64_t(list.size()) * o.heads_q * o.dv;
        outputs[name].emplace_back(at, end);
        at = end;
      }
    }
    auto statuses = cache->commit(std::move(*plan));
    EXPECT_TRUE(statuses.ok());
    for (size_t i = 0; i < batch.size(); ++i) {
      EXPECT_TRUE((*statuses)[i].ok()) << (*statuses)[i].message();
      auto& history = histories[batch[i].first];
      history.insert(history.end(), batch[i].second.begin(), batch[i].second.end());
    }
    EXPECT_TRUE(cache->verify().ok()) << cache->verify().message();
    return outputs;
  }
  Outputs append(const std::string& name, const std::vector<int32_t>& list) { return step({{name, list}})[name]; }

  int64_t start(const std::string& name, const std::vector<int32_t>& prompt) {
    auto started = cache->start(prompt);
    EXPECT_TRUE(started.ok());
    ids[name] = started->id;
    histories[name].assign(prompt.begin(), prompt.begin() + started->reused.n);
    return started->reused.n;
  }
  // Opens a sequence, computes what was not reused in chunks, and returns the attention of the last token.
  Outputs prefill(const std::string& name, const std::vector<int32_t>& prompt, size_t chunk = 1000) {
    size_t at = size_t(start(name, prompt));
    reused = int64_t(at);
    Outputs outputs;
    while (at < prompt.size()) {
      const size_t n = std::min(chunk, prompt.size() - at);
      outputs = append(name, {prompt.begin() + int64_t(at), prompt.begin() + int64_t(at + n)});
      at += n;
    }
    for (auto& out : outputs) out.erase(out.begin(), out.end() - o.heads_q * o.dv);
    return outputs;
  }
  void fork(const std::string& name, const std::string& child) {
    ids[child] = cache->fork(ids[name]).value();
    histories[child] = histories[name];
  }
  Status truncate(const std::string& name, int64_t length) {
    const Status status = cache->truncate(ids[name], Tokens(length));
    if (status.ok()) histories[name].resize(size_t(length));
    return status;
  }
  void close(std::string name) {
    EXPECT_TRUE(cache->release(ids[name]).ok());
    ids.erase(name);
    histories.erase(name);
  }

  // The stored rows of a sequence are those of its own history, within the format's bound; attention over them in
  // double equals `outputs` of its last token, as well as its query path allows (tests/kernels is stricter on
  // int8).
  void expect_right(const std::string& name, const Outputs& outputs) {
    const auto& history = histories[name];
    const double tolerance = cache->query_path() == QueryPath::kF32 ? 2e-5 : 5e-2;
    for (int layer = 0; layer < o.layers; ++layer) {
      std::vector<float> k, v, q;
      rows(history, history.size(), layer, k, v, q);
      auto dense = cache->read_dense(ids[name], layer);
      ASSERT_TRUE(dense.ok()) << dense.status().message();
      expect_stored(dense->k, k, o.dk, o.formats.k);
      expect_stored(dense->v, v, o.dv, o.formats.v);
      const int64_t n = int64_t(history.size()), from = o.window == 0 ? 0 : std::max<int64_t>(0, n - o.window);
      for (int64_t h = 0; h < o.heads_q; ++h) {
        const int64_t kv = h / (o.heads_q / o.heads_kv);
        std::vector<double> p;
        double most = -INFINITY, sum = 0;
        for (int64_t t = from; t < n; ++t) {
          double s = 0;
          for (int64_t i = 0; i < o.dk; ++i)
            s += double(q[size_t(((n - 1) * o.heads_q + h) * o.dk + i)]) *
                 double(dense->k[size_t((t * o.heads_kv + kv) * o.dk + i)]);
          p.push_back(s / std::sqrt(double(o.dk)));
          most = std::max(most, p.back());
        }
        for (double& x : p) sum += x = std::exp(x - most);
        for (int64_t i = 0; i < o.dv; ++i) {
          double expected = 0;
          for (int64_t t = from; t < n; ++t)
            expected += p[size_t(t - from)] / sum * double(dense->v[size_t((t * o.heads_kv + kv) * o.dv + i)]);
          ASSERT_NEAR(outputs[size_t(layer)][size_t(h * o.dv + i)], expected, tolerance)
              << name << " layer " << layer << " head " << h;
        }
      }
    }
  }

  template <class Body>
  void parts(const Body& body) const {
    std::vector<std::thread> threads;
    for (int i = 1; i < o.threads; ++i) threads.emplace_back([&body, i, this] { body(Part{i, o.threads}); });
    body(Part{0, o.threads});
    for (auto& thread : threads) thread.join();
  }

  DeskOptions o;
  std::unique_ptr<Cache> cache;
  std::map<std::string, SequenceId> ids;
  std::map<std::string, std::vector<int32_t>> histories;
  Status last;
  int64_t reused = 0;

 private:
  static void expect_stored(const std::vector<float>& have, const std::vector<float>& want, int64_t dim,
                            Format format) {
    ASSERT_EQ(have.size(), want.size());
    const float steps = format == Format::kQ8     ? 127
                        : format == Format::kQ6   ? 31
                        : format == Format::kQ4   ? 7
                        : format == Format::kBF16 ? 128
                                                  : 1024;
    for (size_t row = 0; row < want.size(); row += size_t(dim)) {
      float most = 0;
      for (size_t i = row; i < row + size_t(dim); ++i) most = std::max(most, std::abs(want[i]));
      for (size_t i = row; i < row + size_t(dim); ++i)
        ASSERT_NEAR(have[i], want[i], most * 0.5001f / steps)
            << "row " << row / size_t(dim) << " channel " << i - row;
    }
  }
};

inline bool same_bits(const Outputs& a, const Outputs& b) {
  if (a.size() != b.size()) return false;
  for (size_t l = 0; l < a.size(); ++l)
    if (a[l].size() != b[l].size() || std::memcmp(a[l].data(), b[l].data(), a[l].size() * sizeof(float)) != 0)
      return false;
  return true;
}

inline std::vector<int32_t> tokens(int32_t from, int32_t to) {
  std::vector<int32_t> list;
  for (int32_t t = from; t < to; ++t) list.push_back(t);
  return list;
}

inline const KvQuantConfig kConfigs[] = {{Format::kF32, Format::kF32},   {Format::kF16, Format::kF16},
                                         {Format::kBF16, Format::kBF16}, {Format::kQ8, Format::kQ8},
                                         {Format::kQ6, Format::kQ6},     {Format::kQ4, Format::kQ4},
                                         {Format::kQ8, Format::kQ4},     {Format::kF16, Format::kQ6}};

}  // namespace pagedkv
