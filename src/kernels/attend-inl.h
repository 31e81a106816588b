// attend and merge. Compiled once per instruction set.
//
// Equal bits for any partition: tiles and runs lie at fixed positions of the sequence, each run starts afresh, runs
// are folded from left to right by one function, and what a row does not see changes none of its bits.
#pragma once

#include "kernels/codes-inl.h"
#include "kernels/panels-inl.h"
#include "kernels/softmax-inl.h"

namespace pagedkv::kernels::PKV_ISA {
namespace {

// Rows whose queries and sums are kept at once; a row here is one query head of one token.
constexpr int64_t kStateRows = 256;
// Up to so many rows read packed bytes directly; more share one decoded copy of the tile.
constexpr int64_t kDirectRows = 8;
// Tiles between the one in use and the one being fetched.
constexpr int64_t kAhead = 2;

PKV_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
PKV_INLINE int64_t max64(int64_t a, int64_t b) { return a < b ? b : a; }

PKV_INLINE int64_t state_rows(const LayerStore& layer, const AttendShape& shape) {
  return max64(kStateRows, shape.num_q_heads / layer.num_kv_heads);
}

PKV_INLINE int64_t padded_sums(const LayerStore& layer, const AttendShape& shape) {
  return shape.v_codes ? padded_codes(layer.v.head_dim) : padded_dim(layer.v.format, layer.v.head_dim);
}
PKV_INLINE Lanes lanes_of_sums(const LayerStore& layer, const AttendShape& shape) {
  if (shape.v_codes) return Lanes::kZipped;
  return layer.v.format == Format::kQ4 ? Lanes::kEvenOdd : Lanes::kInOrder;
}

// The scratch of one part, cut into arrays. Rows are padded to whole units and in lane order.
struct PartScratch {
  int64_t dk, dv;     // floats of a row of q and k, of acc and v
  float* q;           // [state_rows, dk]; not where queries are codes
  int64_t dq;         // bytes of a plane of query codes; 0: queries are floats
  int planes;         // of a row of query codes
  uint8_t* q_codes;   // [state_rows, planes, dq]
  uint8_t* q_spread;  // [state_rows, planes, 4 * dq]
  float* q_scales;    // [state_rows]
  int32_t* q_sums;    // [state_rows]
  float* acc;         // [state_rows, dv] of the current run
  float* total;       // [state_rows, dv] of the runs before
  RowState* run;      // [state_rows]
  RowState* runs;     // [state_rows]
  float* k_tile;      // [kTile * dk] as a panel
  float* v_tile;      // [kTile * dv]
  int64_t bytes;

  PartScratch(const LayerStore& layer, const AttendShape& shape, std::byte* base) {
    const int64_t n = state_rows(layer, shape);
    dk = padded_dim(layer.k.format, layer.k.head_dim);
    dv = padded_sums(layer, shape);
    dq = shape.k_codes ? padded_codes(layer.k.head_dim) : 0;
    planes = planes_of(layer.k.format);
    int64_t at = 0;
    const auto take = [&](int64_t floats) {
      float* array = base == nullptr ? nullptr : reinterpret_cast<float*>(base + at);
      at += round_up(floats * int64_t(sizeof(float)), 64);
      return array;
    };
    q = take(shape.k_codes ? 0 : n * dk);
    q_codes = reinterpret_cast<uint8_t*>(take(n * planes * dq / 4));
    q_spread = reinterpret_cast<uint8_t*>(take(n * planes * dq));
    q_scales = take(n);
    q_sums = reinterpret_cast<int32_t*>(take(n));
    acc = take(n * dv);
    total = take(n * dv);
    run = reinterpret_cast<RowState*>(take(n * 2));
    runs = reinterpret_cast<RowState*>(take(n * 2));
    k_tile = take(kTile * dk);
    v_tile = take(kTile * dv);
    bytes = at;
  }
};

// Some tokens of an item with some KV heads: at most state_rows rows, [head][token][head of the group].
struct Slice {
  const WorkItem* item;
  int64_t token_begin, token_end;  // of the step
  int64_t head_begin, head_end;    // KV heads
  int64_t first_position;          // of token_begin in its sequence; negative: sees nothing
  int64_t head_rows;               // rows of one KV head
  int64_t begin, end;              // keys that some row sees, inside the item's runs; none: begin >= end

  int64_t heads() const { return head_end - head_begin; }
  bool same_rows(const Slice& other) const {
    return token_begin == other.token_begin && token_end == other.token_end && head_begin == other.head_begin &&
           head_end == other.head_end;
  }
  int64_t first_tile() const { return begin / kTile; }
  int64_t n_tiles() const { return begin < end ? (end + kTile - 1) / kTile - first_tile() : 0; }
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return a <= 0 ? 0 : (a + b - 1) / b; }

// The slices of one part in order. A part takes the (item, KV head) units whose middle lies inside its share of the
// cost: with units of 256 tokens and one more behind, two parts are even that way (by their beginnings, 4 to 2).
class Slices {
 public:
  Slices(const AttendCall& call, Part part)
      : call_(call),
        begin_(call.total_cost * part.index / part.count),
        end_(call.total_cost * (part.index + 1) / part.count) {
    int64_t hi = call.n_items;  // item_: the first one that does not end before `begin_`
    while (item_ < hi) {
      const int64_t middle = (item_ + hi) / 2;
      const WorkItem& item = call.items[middle];
      if (item.cost_before + item.cost * call.layer.num_kv_heads <= begin_) {
        item_ = middle + 1;
      } else {
        hi = middle;
      }
    }
    enter_item();
  }

  bool next(Slice& slice) {
    while (head_ >= head_end_) {
      if (item_ >= call_.n_items) return false;
      ++item_;
      enter_item();
    }
    const WorkItem& item = call_.items[item_];
    const int64_t new_begin = call_.batch.query_start_loc[item.sequence];
    const int64_t n_new = call_.batch.query_start_loc[item.sequence + 1] - new_begin;
    const int64_t length = call_.batch.seq_lens[item.sequence], window = call_.shape.sliding_window;
    const int64_t group = call_.shape.num_q_heads / call_.layer.num_kv_heads;
    const int64_t capacity = state_rows(call_.layer, call_.shape);
    const int64_t tokens = min64(item.row_end - item.row_begin, max64(1, capacity / group));
    const int64_t heads = max64(1, capacity / (tokens * group));
    slice = {.item = &item,
             .token_begin = token_,
             .token_end = min64(item.row_end, token_ + tokens),
             .head_begin = head_,
             .head_end = min64(head_end_, head_ + heads)};
    slice.first_position = length - n_new + slice.token_begin - new_begin;
    slice.head_rows = (slice.token_end - slice.token_begin) * group;
    const int64_t past = slice.first_position + slice.token_end - slice.token_begin;
    slice.end = min64(min64(past, length), item.run_end * kRunTokens);
    slice.begin = item.run_begin * kRunTokens;
    if (window > 0) slice.begin = max64(slice.begin, slice.first_position - window + 1);
    token_ = slice.token_end;
    if (token_ >= item.row_end) {
      token_ = item.row_begin;
      head_ = slice.head_end;
    }
    return true;
  }

 private:
  void enter_item() {
    head_ = head_end_ = 0;
    if (item_ >= call_.n_items || call_.items[item_].cost_before >= end_) {
      item_ = call_.n_items;
      return;
    }
    const WorkItem& item = call_.items[item_];
    head_ = first_head_behind(item, begin_);
    head_end_ = first_head_behind(item, end_);
    token_ = item.row_begin;
  }

  int64_t first_head_behind(const WorkItem& item, int64_t cost) const {
    return min64(call_.layer.num_kv_heads, divide_up(2 * (cost - item.cost_before) - item.cost, 2 * item.cost));
  }

  const AttendCall& call_;
  const int64_t begin_, end_;  // of the cost
  int64_t item_ = 0;
  int64_t head_ = 0, head_end_ = 0, token_ = 0;  // of the next slice
};

// The tiles of a part's slices in the order of work: tile by tile, each with all heads of its slice.
class Tiles {
 public:
  Tiles(const AttendCall& call, Part part) : call_(call), slices_(call, part) {}

  // Finds the rows of the next one.
  bool next(Tile& tile) {
    while (tile_ >= n_tiles_) {
      if (!slices_.next(slice_)) return false;
      tile_ = 0;
      head_ = slice_.head_begin;
      n_tiles_ = slice_.n_tiles();
    }
    const int64_t first = (slice_.first_tile() + tile_) * kTile;
    find_tile(call_.layer, call_.batch.block_tables + slice_.item->sequence * call_.batch.max_blocks,
              call_.batch.max_blocks, first, int(max64(0, slice_.begin - first)),
              int(min64(kTile, slice_.end - first)), head_, tile);
    if (++head_ == slice_.head_end) {
      head_ = slice_.head_begin;
      ++tile_;
    }
    return true;
  }

 private:
  const AttendCall& call_;
  Slices slices_;
  Slice slice_;
  int64_t tile_ = 0, n_tiles_ = 0, head_ = 0;  // of the next one
};

class Attention {
 public:
  Attention(const AttendCall& call, Part part)
      : call_(call),
        k_(call.layer.k),
        v_(call.layer.v),
        group_(call.shape.num_q_heads / call.layer.num_kv_heads),
        scratch_(call.layer, call.shape, call.part_scratch + part.index * call.part_scratch_bytes),
        slices_(call, part),
        to_come_(call, part) {
    k_bytes_ = packed_bytes(k_.format, k_.head_dim);
    v_bytes_ = packed_bytes(v_.format, v_.head_dim);
    k_adjacent_ = adjacent_rows(k_, k_bytes_);
    v_adjacent_ = adjacent_rows(v_, v_bytes_);
  }

  void work() {
    for (; found_ < kAhead && to_come_.next(tiles_[found_]); ++found_) {
    }
    for (Slice slice; slices_.next(slice);) attend_slice(slice);
  }

 private:
  void attend_slice(const Slice& slice) {
    const int64_t n_rows = slice.head_rows * slice.heads(), n_tiles = slice.n_tiles();
    if (!slice.same_rows(queries_of_)) fetch_queries(slice);
    queries_of_ = slice;
    for (int64_t i = 0; i < n_rows; ++i) scratch_.runs[i] = {-kInf, 0};
    bool folded = false;  // some run is in `total`
    fresh_run(n_rows);
    for (int64_t i = 0; i < n_tiles; ++i) {
      const int64_t first = (slice.first_tile() + i) * kTile;
      if (i > 0 && first % kRunTokens == 0) {
        close_run(n_rows, folded);
        folded = true;
        fresh_run(n_rows);
      }
      for (int64_t h = 0; h < slice.heads(); ++h) {
        Tile& tile = tiles_[used_++ % kTiles];
        Tile* ahead = &tiles_[found_ % kTiles];
        to_come_.next(*ahead) ? void(++found_) : void(ahead = nullptr);
        load_scales(call_.layer, tile);
        attend_tile(slice, h, first, tile, ahead);
      }
    }
    if (folded) close_run(n_rows, true);
    write_rows(slice, folded);
  }

  // q * scale, in lane order or as codes.
  void fetch_queries(const Slice& slice) {
    int64_t row = 0;
    for (int64_t h = slice.head_begin; h < slice.head_end; ++h) {
      for (int64_t token = slice.token_begin; token < slice.token_end; ++token) {
        const float* q = call_.q + token * call_.q_token_stride + h * group_ * k_.head_dim;
        for (int64_t g = 0; g < group_; ++g, ++row, q += k_.head_dim) {
          if (call_.shape.k_codes) {
            const int64_t at = row * scratch_.planes * scratch_.dq;
            encode_query(q, k_.head_dim, call_.scale, scratch_.planes, scratch_.q_codes + at,
                         scratch_.q_spread + 4 * at, scratch_.q_scales + row, scratch_.q_sums + row);
            continue;
          }
          float* lanes = scratch_.q + row * scratch_.dk;
          if (k_.format == Format::kQ4) {
            for (int64_t i = 0; i < scratch_.dk; ++i) lanes[i] = 0;
            for (int64_t i = 0; i < k_.head_dim; ++i) lanes[lane_of(k_.format, i)] = q[i] * call_.scale;
          } else {
            for (int64_t i = 0; i < k_.head_dim; ++i) lanes[i] = q[i] * call_.scale;
            for (int64_t i = k_.head_dim; i < scratch_.dk; ++i) lanes[i] = 0;
          }
        }
      }
    }
  }

  void fresh_run(int64_t n_rows) {
    for (int64_t i = 0; i < n_rows; ++i) scratch_.run[i] = {-kInf, 0};
    __builtin_memset(scratch_.acc, 0, size_t(n_rows * scratch_.dv) * sizeof(float));
  }

  // total += run, row by row; the first time there is no total yet.
  void close_run(int64_t n_rows, bool folded) {
    if (!folded) __builtin_memset(scratch_.total, 0, size_t(n_rows * scratch_.dv) * sizeof(float));
    for (int64_t i = 0; i < n_rows; ++i) {
      fold_run(scratch_.total + i * scratch_.dv, scratch_.runs[i], scratch_.acc + i * scratch_.dv, scratch_.run[i],
               scratch_.dv);
    }
  }

  // Head h of the slice (0-based) over the tile at position `first`.
  void attend_tile(const Slice& slice, int64_t h, int64_t first, const Tile& tile, const Tile* ahead) {
    const bool direct = slice.head_rows <= kDirectRows;
    if (!direct) lay_out_tile(tile);
    alignas(64) float s[kBlockRows * kTile];
    alignas(64) uint8_t codes[2 * WeightCodes::kPlane];
    float scales[kBlockRows], alpha[kBlockRows];
    const WeightCodes weights{codes, scales};
    int lo[kBlockRows], hi[kBlockRows];
    for (int64_t r = 0; r < slice.head_rows; r += kBlockRows) {
      const int n = int(min64(kBlockRows, slice.head_rows - r));
      int first_seen = kTile, seen = 0;
      for (int i = 0; i < n; ++i) {
        const int64_t position = slice.first_position + (r + i) / group_;
        hi[i] = int(max64(0, min64(tile.n, position + 1 - first)));
        lo[i] = 0;
        if (call_.shape.sliding_window > 0) {
          lo[i] = int(min64(hi[i], max64(0, position - call_.shape.sliding_window + 1 - first)));
        }
        if (lo[i] < first_seen) first_seen = lo[i];
        if (seen < hi[i]) seen = hi[i];
      }
      if (first_seen >= seen) continue;
      const int end = places_before(seen);
      const int64_t row = h * slice.head_rows + r;
      const Tile* fetched = direct && r == 0 ? ahead : nullptr;
      score(tile, fetched, direct, row, n, end, s);
      if (call_.shape.v_codes) {
        weigh<true>(tile, n, lo, hi, end, s, scratch_.run + row, alpha, weights);
      } else {
        weigh<false>(tile, n, lo, hi, end, s, scratch_.run + row, alpha, weights);
      }
      add_values(tile, fetched, direct, row, n, end, s, weights, alpha);
    }
  }

  // s[i][t] = q . k for rows [row, row + n), without K's scales.
  void score(const Tile& tile, const Tile* ahead, bool direct, int64_t row, int n, int end, float* s) {
    const TileRows packed{tile.k, ahead == nullptr ? nullptr : ahead->k, k_bytes_, k_adjacent_};
    const float* q = scratch_.q + row * scratch_.dk;
    if (call_.shape.k_codes) {
      const CodeProducts& products = code_products_of(k_.format);
      if (direct) {
        products.dot[n - 1](packed, query_codes(row), end, s);
      } else {
        products.dot_panel[n - 1](k_panel(), query_codes(row), end, s);
      }
    } else if (direct) {
      products_of(k_.format).dot[n - 1](packed, q, scratch_.dk, end, s);
    } else {
      kFloatProducts.dot[n - 1](scratch_.k_tile, scratch_.dk, q, scratch_.dk, end, s);
    }
  }

  // acc = acc * alpha + weights . v for the same rows.
  // Inlined: what it gets are registers, not memory. NOLINTNEXTLINE(readability-function-size)
  void add_values(const Tile& tile, const Tile* ahead, bool direct, int64_t row, int n, int end, const float* s,
                  const WeightCodes& weights, const float* alpha) {
    const TileRows packed{tile.v, ahead == nullptr ? nullptr : ahead->v, v_bytes_, v_adjacent_};
    float* acc = scratch_.acc + row * scratch_.dv;
    if (call_.shape.v_codes) {
      const CodeProducts& products = code_products_of(v_.format);
      if (direct) {
        products.add[n - 1](packed, weights, alpha, end, acc, scratch_.dv);
      } else {
        products.add_panel[n - 1](v_panel(), scratch_.dv / kUnit, weights, alpha, end, acc, scratch_.dv);
      }
    } else if (direct) {
      products_of(v_.format).add[n - 1](packed, s, alpha, end, acc, scratch_.dv);
    } else {
      kFloatProducts.add[n - 1](scratch_.v_tile, scratch_.dv, s, alpha, end, acc);
    }
  }

  bool adjacent_rows(const RowStore& store, int64_t row_bytes) const {
    return store.slot_stride == row_bytes && call_.layer.block_size % 4 == 0;
  }
  // Codes take less room than the decoded rows for which it was made.
  uint8_t* k_panel() const { return reinterpret_cast<uint8_t*>(scratch_.k_tile); }
  uint8_t* v_panel() const { return reinterpret_cast<uint8_t*>(scratch_.v_tile); }

  // Once for all rows of the slice.
  void lay_out_tile(const Tile& tile) {
    if (call_.shape.k_codes) {
      code_products_of(k_.format).lay_out_keys({tile.k, nullptr, k_bytes_}, k_panel());
    } else {
      lay_out_key_floats(decoder_of(k_.format), {tile.k, nullptr, k_bytes_}, scratch_.dk, scratch_.k_tile);
    }
    if (call_.shape.v_codes) {
      code_products_of(v_.format).lay_out_values({tile.v, nullptr, v_bytes_}, v_panel());
    } else {
      lay_out_value_floats(decoder_of(v_.format), {tile.v, nullptr, v_bytes_}, scratch_.dv, scratch_.v_tile);
    }
  }

  QueryCodes query_codes(int64_t row) const {
    const int64_t at = row * scratch_.planes * scratch_.dq;
    return {.codes = scratch_.q_codes + at,
            .spread = scratch_.q_spread + 4 * at,
            .scale = scratch_.q_scales + row,
            .sum = scratch_.q_sums + row,
            .plane_bytes = scratch_.dq};
  }

  // Scores to weights: s becomes p times V's scale in [0, end), 0 for what row i does not see, outside
  // [lo[i], hi[i]). alpha is the factor of what each row has summed before. Weights as codes, too, if asked.
  template <bool kCodes, bool kWhole>
  // Inlined: what it gets are registers, not memory. NOLINTNEXTLINE(readability-function-size)
  void weigh_rows(const Tile& tile, int n_rows, const int* lo, const int* hi, int end, float* s, RowState* states,
                  float* alpha, const WeightCodes& weights) {
    const bool k_scaled = has_scales(k_.format), v_scaled = has_scales(v_.format);
    const Vec cap = set1(call_.softcap), inverse_cap = set1(call_.softcap > 0 ? 1.0f / call_.softcap : 0.0f);
    const int v_end = kWhole ? kTile : end;
    static_assert(kBlockRows == 4 && kLanes >= kBlockRows);
    Vec rows[kBlockRows];
    alignas(64) float top[kBlockRows], base[kBlockRows], sums[kBlockRows];
    alignas(64) float fall[kLanes] = {};  // old maximum - new one, row by row
    for (Vec& row : rows) row = set1(-kInf);
    for (int r = 0; r < n_rows; ++r) {
      float* row = s + r * kTile;
      const Vec from = set1(float(lo[r])), to = set1(float(hi[r]));
#pragma GCC unroll 4
      for (int t = 0; t < v_end; t += kLanes) {
        Vec x = load(row + t);
        if (k_scaled) x = mul(x, load(tile.k_scales + t));
        if (call_.softcap > 0) x = mul(cap, tanh(mul(x, inverse_cap)));
        if (!kWhole) {
          const Vec index = load(kTokenOfPlace.at + t);
          x = select_less(index, from, set1(-kInf), x);
          x = select_less(index, to, x, set1(-kInf));
        }
        store(row + t, x);
        rows[r] = max(rows[r], x);
      }
    }
    reduce_max4(rows, top);
    for (int r = 0; r < n_rows; ++r) {
      if (!kWhole && tile.missing != 0) top[r] = mask_missing(tile, s + r * kTile, end);
      const float old_max = states[r].max, new_max = old_max < top[r] ? top[r] : old_max;
      base[r] = finite_max(new_max);
      fall[r] = old_max - base[r];
      states[r].max = new_max;
    }
    Vec largest[kBlockRows];
    for (int r = 0; r < kBlockRows; ++r) rows[r] = largest[r] = zero();
    for (int r = 0; r < n_rows; ++r) {
      float* row = s + r * kTile;
#pragma GCC unroll 4
      for (int t = 0; t < v_end; t += kLanes) {
        Vec x = sub(load(row + t), set1(base[r]));
        if (kCodes && !kWhole) x = max(set1(-1e6f), x);  // what is not seen was -infinity
        Vec p = kCodes ? exp_for_codes(x) : exp(x);
        rows[r] = add(rows[r], p);
        if (v_scaled) p = mul(p, load(tile.v_scales + t));
        store(row + t, p);
        if constexpr (kCodes) largest[r] = max(largest[r], p);
      }
    }
    reduce_add4(rows, sums);
    alignas(64) float factors[kLanes];
    store(factors, exp(load(fall)));
    for (int r = 0; r < n_rows; ++r) {
      alpha[r] = factors[r];
      states[r].sum = states[r].sum * alpha[r] + sums[r];
    }
    if constexpr (kCodes) {
      const float max_weight = code_products_of(v_.format).max_weight;
      const bool two_planes = planes_of(v_.format) == 2;
      reduce_max4(largest, top);
      for (int r = 0; r < n_rows; ++r) {
        // Sums of such small weights vanish beside those of the tile with the maximum, or all is 0.
        const Vec steps = set1(top[r] > 1e-30f ? max_weight / top[r] : 0.0f);
        uint8_t* codes = weights.codes + r * kTile;
        if (!kWhole) {
          __builtin_memset(codes, 0, kTile);
          __builtin_memset(codes + WeightCodes::kPlane, 0, kTile);
        }
#pragma GCC unroll 4
        for (int t = 0; t < v_end; t += kLanes) {
          const Vec code = mul(load(s + r * kTile + t), steps);
          two_planes ? store_u15(codes + t, codes + WeightCodes::kPlane + t, code) : store_u8(codes + t, code);
        }
        weights.scale[r] = top[r] / max_weight;
      }
    }
  }

  template <bool kCodes>
  // Inlined: what it gets are registers, not memory. NOLINTNEXTLINE(readability-function-size)
  void weigh(const Tile& tile, int n_rows, const int* lo, const int* hi, int end, float* s, RowState* states,
             float* alpha, const WeightCodes& weights) {
    bool whole = tile.missing == 0;
    for (int r = 0; r < n_rows; ++r) whole &= lo[r] == 0 && hi[r] == kTile;
    if (whole) {
      weigh_rows<kCodes, true>(tile, n_rows, lo, hi, end, s, states, alpha, weights);
    } else {
      weigh_rows<kCodes, false>(tile, n_rows, lo, hi, end, s, states, alpha, weights);
    }
  }

  static float mask_missing(const Tile& tile, float* row, int end) {
    float top = -kInf;
    for (int t = 0; t < end; ++t) {
      if ((tile.missing >> t & 1) != 0) row[t] = -kInf;
      if (top < row[t]) top = row[t];
    }
    return top;
  }

  void write_rows(const Slice& slice, bool folded) {
    float* acc = folded ? scratch_.total : scratch_.acc;
    const RowState* states = folded ? scratch_.runs : scratch_.run;
    const int64_t q_heads = call_.shape.num_q_heads;
    int64_t row = 0;
    for (int64_t h = slice.head_begin; h < slice.head_end; ++h) {
      for (int64_t token = slice.token_begin; token < slice.token_end; ++token) {
        for (int64_t q_head = h * group_; q_head < (h + 1) * group_; ++q_head, ++row, acc += scratch_.dv) {
          if (slice.item->partial >= 0) {
            const int64_t index = (slice.item->partial + token - slice.item->row_begin) * q_heads + q_head;
            float* partial = call_.partials + index * partial_floats(v_.head_dim);
            float* state = partial + partial_floats(v_.head_dim) - 16;
            __builtin_memcpy(partial, acc, size_t(scratch_.dv) * sizeof(float));
            state[0] = states[row].max;
            state[1] = states[row].sum;
          } else {
            finish(call_, acc, states[row], token, q_head);
          }
        }
      }
    }
  }

 public:
  static void finish(const AttendCall& call, float* acc, RowState state, int64_t token, int64_t q_head) {
    const int64_t row = token * call.shape.num_q_heads + q_head, head_dim = call.layer.v.head_dim;
    finish_row(acc, state, lanes_of_sums(call.layer, call.shape), padded_sums(call.layer, call.shape), head_dim,
               {.out = call.out + row * head_dim,
                .lse = call.lse == nullptr ? nullptr : call.lse + row,
                .sink = call.sinks == nullptr ? nullptr : call.sinks + q_head});
  }

 private:
  const AttendCall& call_;
  const RowStore& k_;
  const RowStore& v_;
  const int64_t group_;  // query heads of a KV head
  PartScratch scratch_;
  int64_t k_bytes_, v_bytes_;
  bool k_adjacent_, v_adjacent_;  // TileRows::adjacent
  static constexpr int64_t kTiles = kAhead + 1;
  Slices slices_;
  Slice queries_of_{};  // the slice whose queries are in the scratch
  Tiles to_come_;
  Tile tiles_[kTiles];
  int64_t found_ = 0, used_ = 0;  // tiles so far
};

}  // namespace

int64_t part_scratch_bytes(const LayerStore& layer, const AttendShape& shape) {
  return PartScratch(layer, shape, nullptr).bytes;
}

void attend(const AttendCall& call, Part part) { Attention(call, part).work(); }

// Parts share the flat (row, query head) grid of all merge items.
void merge(const AttendCall& call, Part part) {
  const int64_t q_heads = call.shape.num_q_heads, head_dim = call.layer.v.head_dim;
  const int64_t stride = partial_floats(head_dim), padded = padded_sums(call.layer, call.shape);
  int64_t total = 0;
  for (int64_t i = 0; i < call.n_merges; ++i) total += call.merges[i].row_end - call.merges[i].row_begin;
  total *= q_heads;
  const int64_t begin = total * part.index / part.count, end = total * (part.index + 1) / part.count;
  alignas(64) float acc[kMaxHeadDim];
  int64_t first = 0;  // flat index of the item's first row
  for (int64_t i = 0; i < call.n_merges && first < end; ++i) {
    const MergeItem& item = call.merges[i];
    const int64_t n = (item.row_end - item.row_begin) * q_heads;
    for (int64_t row = max64(begin, first) - first; row < min64(end - first, n); ++row) {
      RowState state{-kInf, 0};
      __builtin_memset(acc, 0, size_t(padded) * sizeof(float));
      for (int64_t run = item.run_begin; run < item.run_end; ++run) {
        const int64_t index = item.partial_begin * q_heads + (run - item.run_begin) * n + row;
        const float* partial = call.partials + index * stride;
        fold_run(acc, state, partial, {partial[stride - 16], partial[stride - 15]}, padded);
      }
      Attention::finish(call, acc, state, item.row_begin + row / q_heads, row % q_heads);
    }
    first += n;
  }
}

}  // namespace pagedkv::kernels::PKV_ISA
