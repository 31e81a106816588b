// A world of sequences in a paged store, and attention in double over what the store holds.
//
//   World w({.entry = entry, .format_k = Format::kQ8, .format_v = Format::kQ8, .lengths = {300, 17}});
//   Rows got = w.attend({{.sequence = 0, .length = 300, .n_new = 1}, {.sequence = 1, .length = 17, .n_new = 17}});
//   w.expect_near_reference(got, queries);
//
// Every sequence has K, V and q for all its positions; a query names how much of a sequence there is and how many
// of the newest rows ask. Block tables are shuffled; everything that nobody may read is poisoned.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/plan/work.h"
#include "pagedkv/layout.h"
#include "tests/kernels/half.h"
#include "tests/kernels/naive_formats.h"

namespace pagedkv {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline std::vector<const kernels::Entry*> supported_entries() {
  std::vector<const kernels::Entry*> list;
  for (const kernels::Entry& entry : kernels::entries()) {
    if (entry.supported()) list.push_back(&entry);
  }
  return list;
}

inline void for_each_entry(const std::function<void(const kernels::Entry&)>& body) {
  for (const kernels::Entry* entry : supported_entries()) {
    SCOPED_TRACE(std::string(entry->name));
    body(*entry);
  }
}

// The path of worlds made now: products over codes, for the formats that have them.
inline bool use_codes = false;

// Formats with codes come twice: by the f32 path, then by the int8 path.
inline void for_each_entry_and_format(const std::function<void(const kernels::Entry&, Format)>& body) {
  for_each_entry([&](const kernels::Entry& entry) {
    for (const bool codes : {false, true}) {
      for (Format format : kAllFormats) {
        if (codes && !is_quantized(format)) continue;
        SCOPED_TRACE(std::string(format_name(format)) + (codes ? " by codes" : ""));
        use_codes = codes;
        body(entry, format);
      }
    }
    use_codes = false;
  });
}

// --- the world ---------------------------------------------------------------------------------------------------

struct WorldSpec {
  const kernels::Entry& entry;
  Format format_k = Format::kF16;
  Format format_v = Format::kF16;
  bool k_codes = use_codes && is_quantized(format_k);  // the int8 path
  bool v_codes = use_codes && is_quantized(format_v);
  int64_t num_kv_heads = 1;
  int64_t group = 1;  // query heads of a KV head
  int64_t head_dim_k = 64;
  int64_t head_dim_v = 64;
  int64_t block_size = 16;
  ArenaOrder order = ArenaOrder::kBlockMajor;
  std::vector<int64_t> lengths = {1};
  int64_t sliding_window = 0;
  float scale = 0;  // 0: 1/sqrt(head_dim_k)
  float softcap = 0;
  std::vector<float> sinks = {};  // [num_q_heads] or empty
  float poison = kNan;            // what lies in slots and blocks that nobody may read
  uint64_t seed = 1;
  // Values by sequence, position, head, channel; unset: Gaussian.
  using Values = std::function<float(int64_t sequence, int64_t position, int64_t head, int64_t channel)>;
  Values q = nullptr, k = nullptr, v = nullptr;
};

struct Query {
  int64_t sequence = 0;
  int64_t length = 0;  // tokens of the sequence that exist in this step
  int64_t n_new = 1;   // the newest rows, which ask
};

// [row][q head][head_dim_v] and [row][q head], rows of all queries of a call in order.
struct Rows {
  std::vector<float> out, lse;
  bool operator==(const Rows& other) const {
    return out.size() == other.out.size() && lse.size() == other.lse.size() &&
           std::memcmp(out.data(), other.out.data(), out.size() * 4) == 0 &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * 4) == 0;
  }
};

inline constexpr int64_t kBefore = 16;  // positions below 0 that have a q: rows of a query longer than its keys

class World {
 public:
  explicit World(WorldSpec spec) : spec_(std::move(spec)), random_(spec_.seed) {
    int64_t used = 0;
    for (int64_t length : spec_.lengths) used += (length + spec_.block_size - 1) / spec_.block_size;
    num_blocks_ = used + 3;
    std::vector<int32_t> ids(static_cast<size_t>(num_blocks_));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random_);
    for (int64_t length : spec_.lengths) {
      const auto n = (length + spec_.block_size - 1) / spec_.block_size;
      tables_.emplace_back(ids.end() - n, ids.end());
      ids.resize(ids.size() - size_t(n));
    }
    lay_out();
    make_values();
    write_all();
  }

  const WorldSpec& spec() const { return spec_; }
  int64_t q_heads() const { return spec_.num_kv_heads * spec_.group; }
  kernels::LayerStore& layer() { return layer_; }
  std::vector<std::vector<int32_t>>& tables() { return tables_; }
  std::vector<std::byte>& arena() { return arena_; }
  const kernels::AppendCounters& counters() const { return counters_; }
  float& k_at(int64_t s, int64_t position, int64_t head, int64_t channel) {
    return k_[size_t(s)][size_t((position * spec_.num_kv_heads + head) * spec_.head_dim_k + channel)];
  }

  // The newest rows of each query, computed in `parts` parts, the last part first.
  Rows attend(const std::vector<Query>& queries, int parts = 1) {
    return run(queries, parts, [](int n, const std::function<void(int)>& part) {
      for (int i = n - 1; i >= 0; --i) part(i);
    });
  }
  Rows attend_on_threads(const std::vector<Query>& queries, int parts) {
    return run(queries, parts, [](int n, const std::function<void(int)>& part) {
      std::vector<std::thread> threads;
      for (int i = 0; i < n; ++i) threads.emplace_back(part, i);
      for (std::thread& thread : threads) thread.join();
    });
  }

 private:
  using RunParts = std::function<void(int n, const std::function<void(int)>& part)>;
  Rows run(const std::vector<Query>& queries, int parts, const RunParts& run_parts) {
    Arrays a = arrays_of(queries);
    const int64_t d = spec_.head_dim_v;
    Rows rows;
    rows.out.assign(size_t(a.n_tokens * q_heads() * d), kNan);
    rows.lse.assign(size_t(a.n_tokens * q_heads()), kNan);
    const kernels::AttendShape shape{.num_q_heads = q_heads(),
                                     .sliding_window = spec_.sliding_window,
                                     .k_codes = spec_.k_codes,
                                     .v_codes = spec_.v_codes};
    kernels::Work work;
    plan_work(a.batch(), spec_.sliding_window, spec_.num_kv_heads, work);
    std::vector<float> partials(size_t(work.partial_rows * q_heads() * kernels::partial_floats(d)), kNan);
    const int64_t scratch_bytes = spec_.entry.part_scratch_bytes(layer_, shape);
    EXPECT_EQ(scratch_bytes % 64, 0);
    std::vector<float> scratch(size_t(scratch_bytes * parts) / 4 + 16, kNan);
    const auto aligned = (reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64;
    const kernels::AttendCall call{
        .layer = layer_,
        .batch = a.batch(),
        .shape = shape,
        .items = work.items.data(),
        .n_items = int64_t(work.items.size()),
        .merges = work.merges.data(),
        .n_merges = int64_t(work.merges.size()),
        .total_cost = work.total_cost,
        .q = a.q.data(),
        .q_token_stride = q_heads() * spec_.head_dim_k,
        .out = rows.out.data(),
        .lse = rows.lse.data(),
        .scale = scale(),
        .softcap = spec_.softcap,
        .sinks = spec_.sinks.empty() ? nullptr : spec_.sinks.data(),
        .partials = partials.data(),
        .part_scratch = reinterpret_cast<std::byte*>(aligned),
        .part_scratch_bytes = scratch_bytes,
    };
    run_parts(parts, [&](int i) { spec_.entry.attend(call, {i, parts}); });
    run_parts(parts, [&](int i) { spec_.entry.merge(call, {i, parts}); });
    n_splits_ = int64_t(work.merges.size());
    return rows;
  }

 public:
  // Sequences that the last attend split into runs.
  int64_t n_splits() const { return n_splits_; }

  // Attention in double over the stored bytes. Tolerances: docs/numerics.md.
  void expect_near_reference(const Rows& got, const std::vector<Query>& queries) const {
    int64_t row = 0;
    for (const Query& query : queries) {
      const Decoded stored = decode(query.sequence);
      for (int64_t i = 0; i < query.n_new; ++i, ++row) {
        for (int64_t h = 0; h < q_heads(); ++h) {
          expect_row(got, row, h, query, query.length - query.n_new + i, stored);
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }

  // Root mean square of the error against attention in double over the values before they were stored, relative to
  // that attention's own: what format and path lose together.
  double loss(const Rows& got, const std::vector<Query>& queries) const {
    double error = 0, magnitude = 0;
    size_t at = 0;
    for (const Query& query : queries) {
      const auto& k = k_[size_t(query.sequence)];
      const auto& v = v_[size_t(query.sequence)];
      for (int64_t position = query.length - query.n_new; position < query.length; ++position) {
        for (int64_t h = 0; h < q_heads(); ++h) {
          const int64_t heads = spec_.num_kv_heads, kv = h / spec_.group, dk = spec_.head_dim_k,
                        dv = spec_.head_dim_v;
          const float* q = q_[size_t(query.sequence)].data() + ((position + kBefore) * q_heads() + h) * dk;
          std::vector<double> mean(size_t(dv), 0);
          double sum = 0;
          for (int64_t t = 0; t <= position; ++t) {
            double dot = 0;
            for (int64_t c = 0; c < dk; ++c) dot += double(q[c]) * double(k[size_t((t * heads + kv) * dk + c)]);
            const double p = std::exp(dot * scale());
            sum += p;
            for (int64_t c = 0; c < dv; ++c) mean[size_t(c)] += p * double(v[size_t((t * heads + kv) * dv + c)]);
          }
          for (int64_t c = 0; c < dv; ++c, ++at) {
            const double want = mean[size_t(c)] / sum;
            error += (got.out[at] - want) * (got.out[at] - want);
            magnitude += want * want;
          }
        }
      }
    }
    return std::sqrt(error / magnitude);
  }

  // Largest error seen by expect_near_reference, as a share of what is allowed.
  double worst_share() const { return worst_; }

  // A query of every row of one sequence, in chunks of `chunk` new tokens: the rows, in order.
  Rows in_chunks(int64_t sequence, int64_t chunk, int parts = 1) {
    Rows all;
    const int64_t length = spec_.lengths[size_t(sequence)];
    for (int64_t end = std::min(chunk, length), begin = 0; begin < length;
         begin = end, end = std::min(end + chunk, length)) {
      const Rows rows = attend({{.sequence = sequence, .length = end, .n_new = end - begin}}, parts);
      all.out.insert(all.out.end(), rows.out.begin(), rows.out.end());
      all.lse.insert(all.lse.end(), rows.lse.begin(), rows.lse.end());
    }
    return all;
  }

 private:
  struct Arrays {
    int64_t n_tokens = 0, max_blocks = 0;
    std::vector<int32_t> tables, lens, starts;
    std::vector<float> q;
    kernels::Batch batch() const {
      return {.n_sequences = int64_t(lens.size()),
              .n_tokens = n_tokens,
              .max_blocks = max_blocks,
              .block_tables = tables.data(),
              .seq_lens = lens.data(),
              .query_start_loc = starts.data()};
    }
  };
  struct Decoded {
    std::vector<std::vector<double>> k, v;  // [position * num_kv_heads + head]
    std::vector<double> v_scale;
  };

  float scale() const { return spec_.scale != 0 ? spec_.scale : 1.0f / std::sqrt(float(spec_.head_dim_k)); }

  // Both orders as DESIGN sections 4 and 11 have them; every byte poisoned.
  void lay_out() {
    const int64_t bs = spec_.block_size, heads = spec_.num_kv_heads;
    const int64_t k_row = row_bytes(spec_.format_k, spec_.head_dim_k).n,
                  v_row = row_bytes(spec_.format_v, spec_.head_dim_v).n;
    const auto pad = [](int64_t n) { return (n + 63) / 64 * 64; };
    const auto place = [&](kernels::RowStore& store, Format format, int64_t d, int64_t row, int64_t rows_at,
                           int64_t scales_at, int64_t image) {
      store.format = format;
      store.head_dim = d;
      store.rows = arena_.data() + rows_at;
      store.scales = is_quantized(format) ? arena_.data() + scales_at : nullptr;
      if (image > 0) {  // head-major rows inside an image
        store.block_stride = store.scale_block_stride = image;
        store.head_stride = bs * row, store.slot_stride = row;
        store.scale_head_stride = bs * 4, store.scale_slot_stride = 4;
      } else {
        store.block_stride = bs * heads * row, store.slot_stride = heads * row, store.head_stride = row;
        store.scale_block_stride = bs * heads * 4, store.scale_slot_stride = heads * 4, store.scale_head_stride = 4;
      }
    };
    const int64_t rows_a_block = bs * heads;
    if (spec_.order == ArenaOrder::kBlockMajor) {
      const int64_t v_at = pad(rows_a_block * k_row), ks_at = v_at + pad(rows_a_block * v_row);
      const int64_t vs_at = ks_at + pad(rows_a_block * 4),
                    image = (vs_at + pad(rows_a_block * 4) + 127) / 128 * 128;
      arena_.resize(size_t(num_blocks_ * image));
      place(layer_.k, spec_.format_k, spec_.head_dim_k, k_row, 0, ks_at, image);
      place(layer_.v, spec_.format_v, spec_.head_dim_v, v_row, v_at, vs_at, image);
    } else {  // scales first, so that the arena ends with the last V row: reading past it is an ASan error
      const int64_t n = num_blocks_ * rows_a_block;
      arena_.resize(size_t(n * (8 + k_row + v_row)));
      place(layer_.k, spec_.format_k, spec_.head_dim_k, k_row, n * 8, 0, 0);
      place(layer_.v, spec_.format_v, spec_.head_dim_v, v_row, n * (8 + k_row), n * 4, 0);
    }
    layer_.block_size = bs;
    layer_.num_kv_heads = heads;
    layer_.num_blocks = num_blocks_;
    poison_all();
  }

  void poison_all() {
    const auto rows_of = [&](kernels::RowStore& store) {
      const int64_t bytes = row_bytes(store.format, store.head_dim).n;
      for (int64_t b = 0; b < num_blocks_; ++b) {
        for (int64_t s = 0; s < spec_.block_size; ++s) {
          for (int64_t h = 0; h < spec_.num_kv_heads; ++h) {
            std::byte* row = store.rows + b * store.block_stride + s * store.slot_stride + h * store.head_stride;
            for (int64_t i = 0; i < bytes; ++i) row[i] = poison_byte(store.format, i);
            if (store.scales == nullptr) continue;
            std::memcpy(store.scales + b * store.scale_block_stride + s * store.scale_slot_stride +
                            h * store.scale_head_stride,
                        &spec_.poison, 4);
          }
        }
      }
    };
    rows_of(layer_.k);
    rows_of(layer_.v);
  }
  std::byte poison_byte(Format format, int64_t i) const {
    uint32_t bits;
    std::memcpy(&bits, &spec_.poison, 4);
    if (format == Format::kF32) return std::byte(bits >> (8 * (i % 4)));
    if (format == Format::kF16) return std::byte(f32_to_f16(spec_.poison) >> (8 * (i % 2)));
    if (format == Format::kBF16) return std::byte(f32_to_bf16(spec_.poison) >> (8 * (i % 2)));
    return std::byte(0x7f);
  }

  void make_values() {
    std::normal_distribution<float> gauss;
    const auto make = [&](const WorldSpec::Values& values, int64_t s, int64_t first, int64_t n, int64_t heads,
                          int64_t d) {
      std::vector<float> x;
      x.reserve(size_t(n * heads * d));
      for (int64_t t = 0; t < n; ++t) {
        for (int64_t h = 0; h < heads; ++h) {
          for (int64_t c = 0; c < d; ++c) x.push_back(values ? values(s, first + t, h, c) : gauss(random_));
        }
      }
      return x;
    };
    for (int64_t s = 0; s < int64_t(spec_.lengths.size()); ++s) {
      const int64_t n = spec_.lengths[size_t(s)];
      q_.push_back(make(spec_.q, s, -kBefore, n + kBefore, q_heads(), spec_.head_dim_k));
      k_.push_back(make(spec_.k, s, 0, n, spec_.num_kv_heads, spec_.head_dim_k));
      v_.push_back(make(spec_.v, s, 0, n, spec_.num_kv_heads, spec_.head_dim_v));
    }
  }

  // Every token of every sequence in one step.
  void write_all() {
    std::vector<float> k, v;
    std::vector<int64_t> slots;
    std::vector<int32_t> starts = {0};
    for (size_t s = 0; s < spec_.lengths.size(); ++s) {
      k.insert(k.end(), k_[s].begin(), k_[s].end());
      v.insert(v.end(), v_[s].begin(), v_[s].end());
      for (int64_t t = 0; t < spec_.lengths[s]; ++t) slots.push_back(slot_of(int64_t(s), t));
      starts.push_back(int32_t(slots.size()));
    }
    std::vector<uint64_t> faults(spec_.lengths.size(), kernels::kNoFault);
    const kernels::AppendCall call{
        .layer = layer_,
        .batch = {.n_sequences = int64_t(spec_.lengths.size()),
                  .n_tokens = int64_t(slots.size()),
                  .query_start_loc = starts.data(),
                  .slot_mapping = slots.data()},
        .k = {k.data(), ElementType::kF32, spec_.num_kv_heads * spec_.head_dim_k, spec_.head_dim_k},
        .v = {v.data(), ElementType::kF32, spec_.num_kv_heads * spec_.head_dim_v, spec_.head_dim_v},
        .faults = faults.data(),
        .counters = &counters_};
    for (int i = 0; i < 3; ++i) spec_.entry.append(call, {i, 3});
    for (uint64_t fault : faults) EXPECT_EQ(fault, kernels::kNoFault);
  }

 public:
  int64_t slot_of(int64_t sequence, int64_t position) const {
    return int64_t(tables_[size_t(sequence)][size_t(position / spec_.block_size)]) * spec_.block_size +
           position % spec_.block_size;
  }

 private:
  // Tables hold only the blocks that `length` needs; behind them lies -1 or, in every other row, a bad id.
  Arrays arrays_of(const std::vector<Query>& queries) const {
    Arrays a;
    for (const Query& query : queries) {
      a.max_blocks = std::max(a.max_blocks, (query.length + spec_.block_size - 1) / spec_.block_size + 1);
    }
    a.starts.push_back(0);
    for (const Query& query : queries) {
      const auto& table = tables_[size_t(query.sequence)];
      const int64_t held = (query.length + spec_.block_size - 1) / spec_.block_size;
      for (int64_t i = 0; i < a.max_blocks; ++i) {
        a.tables.push_back(i < held ? table[size_t(i)] : a.lens.size() % 2 == 0 ? -1 : 0x7ffffff0);
      }
      a.lens.push_back(int32_t(query.length));
      a.n_tokens += query.n_new;
      a.starts.push_back(int32_t(a.n_tokens));
      const int64_t width = q_heads() * spec_.head_dim_k;
      const auto first = q_[size_t(query.sequence)].begin() + (query.length - query.n_new + kBefore) * width;
      a.q.insert(a.q.end(), first, first + query.n_new * width);
    }
    return a;
  }

  Decoded decode(int64_t sequence) const {
    Decoded d;
    for (int64_t t = 0; t < spec_.lengths[size_t(sequence)]; ++t) {
      const int64_t slot = slot_of(sequence, t), block = slot / spec_.block_size, at = slot % spec_.block_size;
      for (int64_t h = 0; h < spec_.num_kv_heads; ++h) {
        float row_scale = 1;
        const auto row = [&](const kernels::RowStore& store) {
          row_scale = 1;
          if (store.scales != nullptr) {
            std::memcpy(&row_scale,
                        store.scales + block * store.scale_block_stride + at * store.scale_slot_stride +
                            h * store.scale_head_stride,
                        4);
          }
          const std::byte* bytes =
              store.rows + block * store.block_stride + at * store.slot_stride + h * store.head_stride;
          return naive_decode(reinterpret_cast<const uint8_t*>(bytes), row_scale, store.head_dim, store.format);
        };
        d.k.push_back(row(layer_.k));
        d.v.push_back(row(layer_.v));
        d.v_scale.push_back(row_scale);
      }
    }
    return d;
  }

  void expect_row(const Rows& got, int64_t row, int64_t q_head, const Query& query, int64_t position,
                  const Decoded& stored) const {
    const int64_t kv_head = q_head / spec_.group, heads = spec_.num_kv_heads;
    const std::vector<double> q = scaled_query(q_[size_t(query.sequence)].data() +
                                               ((position + kBefore) * q_heads() + q_head) * spec_.head_dim_k);
    const int64_t first = spec_.sliding_window > 0 ? std::max<int64_t>(0, position - spec_.sliding_window + 1) : 0;
    std::vector<double> logits;
    double top = -INFINITY, terms = 0;  // terms: largest sum of |q*k| of a visible key, the logit's condition
    for (int64_t t = first; t <= position; ++t) {
      const auto& k = stored.k[size_t(t * heads + kv_head)];
      double dot = 0, absolute = 0;
      for (int64_t c = 0; c < spec_.head_dim_k; ++c) {
        dot += q[size_t(c)] * k[size_t(c)];
        absolute += std::fabs(q[size_t(c)] * k[size_t(c)]);
      }
      double logit = dot;
      if (spec_.softcap > 0) logit = spec_.softcap * std::tanh(logit / spec_.softcap);
      terms = std::max(terms, absolute);
      logits.push_back(logit);
      top = std::max(top, logit);
    }
    const float lse = got.lse[size_t(row * q_heads() + q_head)];
    const float* out = got.out.data() + (row * q_heads() + q_head) * spec_.head_dim_v;
    const std::string where = "sequence " + std::to_string(query.sequence) + " position " +
                              std::to_string(position) + " q head " + std::to_string(q_head);
    if (logits.empty()) {
      EXPECT_EQ(lse, -kInfinity) << where;
      for (int64_t c = 0; c < spec_.head_dim_v; ++c) EXPECT_EQ(out[c], 0.0f) << where;
      return;
    }
    if (!spec_.sinks.empty()) top = std::max(top, double(spec_.sinks[size_t(q_head)]));
    double sum = spec_.sinks.empty() ? 0 : std::exp(spec_.sinks[size_t(q_head)] - top);
    for (double& logit : logits) {
      logit = std::exp(logit - top);
      sum += logit;
    }
    const double relative = 1e-5 + 0x1p-22 * terms;
    // By codes, weights are multiples of a step: the largest weight of the 64 tokens they lie in, over 127 (q8) or
    // 255.
    std::vector<double> half_step(logits.size());
    if (spec_.v_codes) {
      const double steps = spec_.format_v == Format::kQ8 ? 127 * 128 : 255;
      std::map<int64_t, double> largest;
      for (int64_t t = first; t <= position; ++t)
        largest[t / 64] = std::max(largest[t / 64],
                                   logits[size_t(t - first)] / sum * stored.v_scale[size_t(t * heads + kv_head)]);
      for (int64_t t = first; t <= position; ++t)
        half_step[size_t(t - first)] =
            0.5001 * largest[t / 64] / steps / stored.v_scale[size_t(t * heads + kv_head)];
    }
    for (int64_t c = 0; c < spec_.head_dim_v; ++c) {
      double mean = 0, magnitude = 0, rounding = 0;
      for (int64_t t = first; t <= position; ++t) {
        const double p = logits[size_t(t - first)] / sum;
        const double v = stored.v[size_t(t * heads + kv_head)][size_t(c)];
        mean += p * v;
        magnitude += p * std::fabs(v);
        rounding += half_step[size_t(t - first)] * std::fabs(v);
      }
      check(out[c], mean, relative * magnitude + rounding + 1e-37, where + " channel " + std::to_string(c));
    }
    const double want_lse = top + std::log(sum);
    check(lse, want_lse, 1e-5 * std::max(1.0, std::fabs(want_lse)) + 0x1p-22 * terms, where + " lse");
  }

  // q times the scale; by codes rounded to 127 steps of its largest value (q8: 127 * 128).
  std::vector<double> scaled_query(const float* q) const {
    std::vector<double> scaled;
    float top = 0;
    for (int64_t c = 0; c < spec_.head_dim_k; ++c) top = std::max(top, std::fabs(q[c] * scale()));
    for (int64_t c = 0; c < spec_.head_dim_k; ++c) {
      const float x = q[c] * scale();
      if (!spec_.k_codes) {
        scaled.push_back(double(q[c]) * scale());
      } else {
        const float steps = spec_.format_k == Format::kQ8 ? 127.0f * 128.0f : 127.0f;
        scaled.push_back(top == 0 ? 0.0 : double(std::nearbyint(x * (steps / top))) * double(top / steps));
      }
    }
    return scaled;
  }

  void check(float got, double want, double tolerance, const std::string& where) const {
    EXPECT_TRUE(std::fabs(got - want) <= tolerance)
        << where << ": " << got << ", reference " << want << ", tolerance " << tolerance;
    worst_ = std::max(worst_, std::fabs(got - want) / tolerance);
  }

  WorldSpec spec_;
  std::mt19937_64 random_;
  int64_t num_blocks_ = 0, n_splits_ = 0;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<std::byte> arena_;
  kernels::LayerStore layer_;
  std::vector<std::vector<float>> q_, k_, v_;
  kernels::AppendCounters counters_;
  mutable double worst_ = 0;
};

}  // namespace pagedkv
