// Products of quantized weights with quantized activations: compiled once per instruction set.
//
// Lanes are rows of the weight. Few tokens: a group of codes is unpacked into eight registers and multiplied with
// every token at once, straight from the file's blocks. More tokens: a panel of rows is unpacked into the scratch,
// in the first-level cache, and tiles of tokens go over it. Both add group after group into one lane, so that a
// token's result does not depend on the tokens beside it.
#pragma once

namespace pagedkv::products::PKV_ISA {
namespace {

constexpr int64_t kPanel = int64_t{kTileRows} * kLanes;  // rows
static_assert(kPanelRows % kPanel == 0 && kPanelRows / 2 % kLanes == 0);

PKV_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Codes, scales and sums of the tokens from one token and group on.
struct From {
  const uint8_t* codes;
  const float* scales;
  const float* shifts;
  const int32_t* sums;
  const int32_t* half_sums;
  int64_t code_stride, n_groups;  // between tokens
};
PKV_INLINE From from(const Activations& x, int64_t token, int64_t group) {
  const int64_t at = token * x.n_groups + group;
  return {.codes = reinterpret_cast<const uint8_t*>(x.codes) + token * x.code_stride + group * kGroup,
          .scales = x.scales + at,
          .shifts = x.shifts + at,
          .sums = x.sums + at,
          .half_sums = x.half_sums + 2 * at,
          .code_stride = x.code_stride,
          .n_groups = x.n_groups};
}

template <class Codec>
PKV_INLINE constexpr int64_t group_of(int64_t part) {
  return part * Codec::kPart / kGroup;
}

// Starts the sum of a part, so that the offset of the weights' codes is taken back.
template <class Codec>
PKV_INLINE void start(Sum<Codec::kMaxCode>& sum, const From& x, int64_t token, int64_t part) {
  if constexpr (Codec::kOffset == 0) return sum.start();
  constexpr bool kWhole = Codec::kPart == kGroup;
  const int32_t* sums = kWhole ? x.sums + token * x.n_groups : x.half_sums + 2 * token * x.n_groups;
  sum.template start_below<Codec::kOffset == 0 ? 1 : Codec::kOffset>(sums[part]);
}

// Lanes from `first_lane` on, of which there may be all or none. A masked store is slow on some CPUs.
PKV_INLINE void store_rows(float* to, int64_t first_lane, Vec y) {
  if (first_lane <= 0) return store(to, y);
  if (first_lane < kLanes) store_from(to, first_lane, y);
}

// --- few tokens ------------------------------------------------------------------------------------------------

// kLanes rows from `row` on, n_tokens tokens from `token` on.
template <class Codec, int n_tokens>
PKV_INLINE void rows_of_few(const ProductCall& call, int64_t row, int64_t token, Vec* y) {
  const Weights& w = call.weights;
  const uint8_t* p = w.data + row * w.row_bytes;
  // The next rows, as far as this block is into these: the largest gain of all when weights come from memory.
  const uint8_t* next = p + kLanes * w.row_bytes;
  typename Codec::Heads heads;
#pragma GCC unroll 8
  for (int t = 0; t < n_tokens; ++t) y[t] = zero();
  const int64_t n_blocks = w.n_in / Codec::kElements;
  constexpr int64_t kRun = kDepth / Codec::kElements;
  for (int64_t first = 0; first < n_blocks; first += kRun) {
    const int64_t n = smaller(kRun, n_blocks - first);
    heads.read(p + first * Codec::kBytes, w.row_bytes, n);
    for (int64_t b = 0; b < n; ++b) {
      const uint8_t* block = p + (first + b) * Codec::kBytes;
      for (int i = 0; i < kLanes * Codec::kBytes; i += 64)
        prefetch_soon(next + (first + b) * kLanes * Codec::kBytes + i);
      const From x = from(call.x, token, (first + b) * Codec::kElements / kGroup);
      Codec::block(block, w.row_bytes, heads, b, [&](int part, const Codes* codes, Vec scale, Vec shift) {
#pragma GCC unroll 8
        for (int t = 0; t < n_tokens; ++t) {
          constexpr int kSteps = Codec::kPart / 4;
          const uint8_t* a = x.codes + t * x.code_stride + part * Codec::kPart;
          Sum<Codec::kMaxCode> sum;
          start<Codec>(sum, x, t, part);
#pragma GCC unroll 8
          for (int k = 0; k < kSteps; ++k) sum.add(k, kSteps, codes[k], repeat4(a + 4 * k));
          const int64_t g = t * x.n_groups + group_of<Codec>(part);
          y[t] = fma(sum.times(sum.scale(scale)), set1(x.scales[g]), y[t]);
          if constexpr (Codec::kHasShift) y[t] = fma(shift, set1(x.shifts[g]), y[t]);
        }
      });
    }
  }
}

template <class Codec, int n_tokens>
void few(const ProductCall& call) {
  for (int64_t row = call.out_begin; row < call.out_end; row += kLanes) {
    // The last rows are a full register, too: those before them are computed again and not stored.
    const int64_t first = smaller(row, call.weights.n_out - kLanes);
    Vec y[n_tokens];
    rows_of_few<Codec, n_tokens>(call, first, call.token_begin, y);
#pragma GCC unroll 8
    for (int t = 0; t < n_tokens; ++t)
      store_rows(call.y + (call.token_begin + t) * call.y_stride + first, row - first, y[t]);
  }
}

// --- many tokens -----------------------------------------------------------------------------------------------

// The scratch of a call. Codes [part, dword, register of rows, lanes, 4], scales and shifts [part, rows]; results
// of some of the depth [panel, token, rows].
struct PanelMemory {
  uint8_t* codes;
  float* scales;
  float* shifts;
  float* partial;
};
PKV_INLINE PanelMemory memory_of(std::byte* scratch) {
  auto* floats = reinterpret_cast<float*>(scratch + kPanelRows * kMostDepth);
  constexpr int64_t kScales = kPanelRows * kMostDepth / kGroup;
  return {.codes = reinterpret_cast<uint8_t*>(scratch),
          .scales = floats,
          .shifts = floats + 2 * kScales,
          .partial = floats + 3 * kScales};
}

// Bytes of codes of so many parts of a panel.
template <class Codec>
PKV_INLINE int64_t part_bytes(int64_t parts) {
  return parts * Codec::kPart * kPanel;
}

// Rows from `row` on, elements [begin, begin + n).
template <class Codec>
void unpack(const Weights& w, int64_t row, int64_t begin, int64_t n, const PanelMemory& to) {
  constexpr int64_t kRun = kDepth / Codec::kElements;
  typename Codec::Heads heads;
  const int64_t n_blocks = n / Codec::kElements;
#pragma GCC unroll 1
  for (int64_t r = 0; r < kTileRows; ++r) {
    const uint8_t* p = w.data + (row + r * kLanes) * w.row_bytes + begin / Codec::kElements * Codec::kBytes;
    for (int64_t first = 0; first < n_blocks; first += kRun) {
      const int64_t n_run = smaller(kRun, n_blocks - first);
      heads.read(p + first * Codec::kBytes, w.row_bytes, n_run);
      for (int64_t b = 0; b < n_run; ++b) {
        Codec::block(p + (first + b) * Codec::kBytes, w.row_bytes, heads, b,
                     [&](int part, const Codes* codes, Vec scale, Vec shift) {
                       constexpr int64_t kParts = Codec::kElements / Codec::kPart;
                       const int64_t at = (first + b) * kParts + part;
#pragma GCC unroll 8
                       for (int k = 0; k < Codec::kPart / 4; ++k)
                         store_codes(to.codes + part_bytes<Codec>(at) + (k * kTileRows + r) * kLanes * 4, codes[k]);
                       store(to.scales + (at * kTileRows + r) * kLanes, scale);
                       if constexpr (Codec::kHasShift) store(to.shifts + (at * kTileRows + r) * kLanes, shift);
                     });
      }
    }
  }
}

struct Tile {
  From x;
  int64_t n_in = 0;               // elements
  const float* so_far = nullptr;  // results, kPanel floats a token; null: none
  float* to = nullptr;
  int64_t to_stride = 0;   // floats between tokens
  int64_t first_lane = 0;  // rows before it are not stored
};

template <class Codec, int n_tokens>
void tile(const PanelMemory& w, const Tile& t) {
  Vec y[n_tokens][kTileRows];
#pragma GCC unroll 8
  for (int c = 0; c < n_tokens; ++c)
#pragma GCC unroll 2
    for (int r = 0; r < kTileRows; ++r) y[c][r] = t.so_far ? load(t.so_far + c * kPanel + r * kLanes) : zero();
  const From& x = t.x;
  const int64_t n_parts = t.n_in / Codec::kPart;
  for (int64_t i = 0; i < n_parts; ++i) {
    constexpr int kSteps = Codec::kPart / 4;
    const int64_t part = visited<Codec>(i), g = group_of<Codec>(part);
    const uint8_t* codes = w.codes + part_bytes<Codec>(part);
    const uint8_t* a = x.codes + part * Codec::kPart;
    if (kTilesPrefetch && part % (64 / Codec::kPart) == 0) {  // 64 bytes of the next tile's codes
#pragma GCC unroll 8
      for (int c = 0; c < n_tokens; ++c) prefetch_soon(a + (n_tokens + c) * x.code_stride);
    }
    Sum<Codec::kMaxCode> sum[n_tokens][kTileRows];
#pragma GCC unroll 8
    for (int c = 0; c < n_tokens; ++c)
#pragma GCC unroll 2
      for (int r = 0; r < kTileRows; ++r) start<Codec>(sum[c][r], x, c, part);
#pragma GCC unroll 8
    for (int k = 0; k < kSteps; ++k) {
      Codes w_k[kTileRows];
#pragma GCC unroll 2
      for (int r = 0; r < kTileRows; ++r) w_k[r] = load_codes(codes + (k * kTileRows + r) * kLanes * 4);
#pragma GCC unroll 8
      for (int c = 0; c < n_tokens; ++c) {
        const Codes x_k = repeat4(a + c * x.code_stride + 4 * k);
#pragma GCC unroll 2
        for (int r = 0; r < kTileRows; ++r) sum[c][r].add(k, kSteps, w_k[r], x_k);
      }
    }
    typename Sum<Codec::kMaxCode>::Scale scales[kTileRows];
#pragma GCC unroll 2
    for (int r = 0; r < kTileRows; ++r)
      scales[r] = Sum<Codec::kMaxCode>::scale(load(w.scales + part * kPanel + r * kLanes));
#pragma GCC unroll 8
    for (int c = 0; c < n_tokens; ++c) {
      const Vec scale = set1(x.scales[c * x.n_groups + g]);
#pragma GCC unroll 2
      for (int r = 0; r < kTileRows; ++r) y[c][r] = fma(sum[c][r].times(scales[r]), scale, y[c][r]);
    }
    if constexpr (Codec::kHasShift) {
#pragma GCC unroll 8
      for (int c = 0; c < n_tokens; ++c) {
        const Vec shift = set1(x.shifts[c * x.n_groups + g]);
#pragma GCC unroll 2
        for (int r = 0; r < kTileRows; ++r)
          y[c][r] = fma(load(w.shifts + part * kPanel + r * kLanes), shift, y[c][r]);
      }
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < n_tokens; ++c)
#pragma GCC unroll 2
    for (int r = 0; r < kTileRows; ++r)
      store_rows(t.to + c * t.to_stride + r * kLanes, t.first_lane - r * kLanes, y[c][r]);
}

template <class Codec>
void tile_of(int64_t n_tokens, const PanelMemory& w, const Tile& t) {
  static_assert(kTileColumns <= 6);
  switch (n_tokens) {
    case 1:
      return tile<Codec, 1>(w, t);
    case 2:
      return tile<Codec, 2>(w, t);
    case 3:
      return tile<Codec, 3>(w, t);
    case 4:
      return tile<Codec, (kTileColumns >= 4 ? 4 : 1)>(w, t);
    case 5:
      return tile<Codec, (kTileColumns >= 5 ? 5 : 1)>(w, t);
    default:
      return tile<Codec, (kTileColumns >= 6 ? 6 : 1)>(w, t);
  }
}

// One panel and a part of its depth over the tokens [begin, end).
template <class Codec>
void panel(const ProductCall& call, int64_t row, int64_t begin, int64_t end, int64_t depth, int64_t n,
           float* partial) {
  const PanelMemory memory = memory_of(call.scratch);
  const int64_t first = smaller(row, call.weights.n_out - kPanel);
  unpack<Codec>(call.weights, first, depth, n, memory);
  const bool last = depth + n == call.weights.n_in;
  const int64_t n_tokens = end - begin, n_tiles = (n_tokens + kTileColumns - 1) / kTileColumns;
  for (int64_t i = 0; i < n_tiles; ++i) {  // of equal width as far as it goes: a narrow one is slow
    const int64_t at = n_tokens * i / n_tiles, width = n_tokens * (i + 1) / n_tiles - at;
    float* kept = partial + at * kPanel;
    tile_of<Codec>(width, memory,
                   {.x = from(call.x, begin + at, depth / kGroup),
                    .n_in = n,
                    .so_far = depth > 0 ? kept : nullptr,
                    .to = last ? call.y + (begin + at) * call.y_stride + first : kept,
                    .to_stride = last ? call.y_stride : kPanel,
                    .first_lane = last ? row - first : 0});
  }
}

template <class Codec>
void many(const ProductCall& call) {
  constexpr int64_t kWider = kPanelRows / kPanel;  // a narrow panel is deeper
  const int64_t n_in = call.weights.n_in, step = n_in <= kMostDepth * kWider ? n_in : kDepth * kWider;
  float* partial = memory_of(call.scratch).partial;
  for (int64_t begin = call.token_begin; begin < call.token_end; begin += kMostTokens) {
    const int64_t end = smaller(begin + kMostTokens, call.token_end);
    for (int64_t shared = call.out_begin; shared < call.out_end; shared += kSharedPanels * kPanel)
      for (int64_t depth = 0; depth < n_in; depth += step)
        for (int64_t i = 0; i < kSharedPanels && shared + i * kPanel < call.out_end; ++i)
          panel<Codec>(call, shared + i * kPanel, begin, end, depth, smaller(step, n_in - depth),
                       partial + i * kPanel * kMostTokens);
  }
}

template <class Codec>
void product_of(const ProductCall& call) {
  switch (call.token_end - call.token_begin) {
    case 0:
      return;
    case 1:
      return few<Codec, 1>(call);
    case 2:
      return few<Codec, 2>(call);
    case 3:
      return few<Codec, 3>(call);
    case 4:
      return few<Codec, 4>(call);
    case 5:
      return few<Codec, 5>(call);
    case 6:
      return few<Codec, 6>(call);
    case 7:
      return few<Codec, 7>(call);
    case 8:
      return few<Codec, 8>(call);
    default:
      return many<Codec>(call);
  }
}

void product(const ProductCall& call) {
  switch (call.weights.format) {
    case WeightFormat::kQ40:
      return product_of<Q40>(call);
    case WeightFormat::kQ41:
      return product_of<Q41>(call);
    case WeightFormat::kQ50:
      return product_of<Q50>(call);
    case WeightFormat::kQ51:
      return product_of<Q51>(call);
    case WeightFormat::kQ80:
      return product_of<Q80>(call);
    case WeightFormat::kIQ4NL:
      return product_of<IQ4NL>(call);
    case WeightFormat::kQ3K:
      return product_of<Q3K>(call);
    case WeightFormat::kQ4K:
      return product_of<Q4K>(call);
    case WeightFormat::kQ5K:
      return product_of<Q5K>(call);
    case WeightFormat::kQ6K:
      return product_of<Q6K>(call);
    case WeightFormat::kIQ4XS:
      return product_of<IQ4XS>(call);
  }
}

// --- activations -----------------------------------------------------------------------------------------------

// scale = largest / 127, codes = x * (127 / largest) to the nearest, ties to even; all 0 below kLeast. A group with
// NaN or infinity gets the scale NaN: whatever comes of it is NaN, never a number that looks right.
PKV_INLINE float factor_of(float largest, float* scale) {
  const bool some = largest >= kLeast;
  *scale = some ? largest / 127.0f : 0.0f;
  return some ? 127.0f / largest : 0.0f;
}
constexpr int kVecs = int{kGroup} / kLanes;  // of a group
constexpr int kPackedVecs = 4;               // whose codes are packed at once
constexpr int kPackedHalves = kPackedVecs * kLanes / 16;

void quantize_group(const float* x, int8_t* codes, float* scale) {
  Vec top = zero();
  bool finite = true;
  for (int i = 0; i < kVecs; ++i) {
    const Vec v = load(x + i * kLanes);
    top = max(top, abs(v));
    finite = finite && !any_not_finite(v);
  }
  const Vec factor = set1(factor_of(finite ? reduce_max(top) : 0, scale));
  if (!finite) *scale = __builtin_nanf("");
  for (int i = 0; i < kVecs; ++i) store_i8(codes + i * kLanes, mul(load(x + i * kLanes), factor));
}

// Four groups.
PKV_INLINE void quantize_groups(const float* x, int8_t* codes, float* scales) {
  Vec top[4], not_finite = zero();
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) {
    top[g] = zero();
#pragma GCC unroll 4
    for (int i = 0; i < kVecs; ++i) {
      const Vec v = load(x + (g * kVecs + i) * kLanes);
      top[g] = max(top[g], abs(v));
      not_finite = fma(v, zero(), not_finite);
    }
  }
  if (any_not_finite(not_finite)) {
    for (int g = 0; g < 4; ++g) quantize_group(x + g * kGroup, codes + g * kGroup, scales + g);
    return;
  }
  float largest[4], factors[4];
  reduce_max4(top, largest);
#pragma GCC unroll 4
  for (int g = 0; g < 4; ++g) factors[g] = factor_of(largest[g], scales + g);
#pragma GCC unroll 4
  for (int i = 0; i < 4 * kVecs; i += kPackedVecs) {
    Vec v[kPackedVecs];
#pragma GCC unroll 4
    for (int j = 0; j < kPackedVecs; ++j) v[j] = mul(load(x + (i + j) * kLanes), set1(factors[(i + j) / kVecs]));
    store_codes(reinterpret_cast<uint8_t*>(codes) + i * kLanes, pack(v));
  }
}

void quantize_activations(const QuantizeCall& call) {
  const Activations& to = call.to;
  for (int64_t token = call.token_begin; token < call.token_end; ++token) {
    const float* x = call.x + token * call.x_stride;
    int8_t* codes = to.codes + token * to.code_stride;
    const int64_t first = token * to.n_groups;
    int64_t g = 0;
    for (; g + 4 <= to.n_groups; g += 4) quantize_groups(x + g * kGroup, codes + g * kGroup, to.scales + first + g);
    for (; g < to.n_groups; ++g) quantize_group(x + g * kGroup, codes + g * kGroup, to.scales + first + g);
    int32_t* half_sums = to.half_sums + 2 * first;
    int64_t half = 0;
    for (; half + kPackedHalves <= 2 * to.n_groups; half += kPackedHalves)
      sum_halves(load_codes(reinterpret_cast<uint8_t*>(codes) + half * 16), half_sums + half);
    if (half < 2 * to.n_groups) {  // the codes' stride leaves room for whole registers, that of the sums does not
      int32_t rest[kPackedHalves];
      sum_halves(load_codes(reinterpret_cast<uint8_t*>(codes) + half * 16), rest);
      for (int i = 0; half < 2 * to.n_groups; ++i, ++half) half_sums[half] = rest[i];
    }
    for (g = 0; g < to.n_groups; ++g) {
      to.sums[first + g] = half_sums[2 * g] + half_sums[2 * g + 1];
      to.shifts[first + g] = to.scales[first + g] * float(to.sums[first + g]);
    }
  }
}

}  // namespace
}  // namespace pagedkv::products::PKV_ISA
