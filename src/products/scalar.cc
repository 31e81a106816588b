// The products in plain loops: one weight, one token at a time. What the other entries are checked against, bit by
// bit; it runs everywhere and nobody waits for it.
#include <cmath>
#include <cstring>
#include <limits>

#include "products/products.h"

namespace pagedkv::products {
namespace {

uint16_t word_at(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

float f16_at(const uint8_t* p) {
  const uint16_t x = word_at(p);
  const int exponent = x >> 10 & 31, mantissa = x & 1023;
  float v = exponent == 0   ? std::ldexp(float(mantissa), -24)
            : exponent < 31 ? std::ldexp(float(mantissa + 1024), exponent - 25)
            : mantissa == 0 ? std::numeric_limits<float>::infinity()
                            : std::numeric_limits<float>::quiet_NaN();
  return x >> 15 ? -v : v;
}

// A group of 32 weights: weight = scale * code + shift, with a scale for each half.
struct Group {
  int codes[32];
  float scales[2];  // of each half: only those of Q3_K and Q6_K differ
  float shift;
  bool has_shift;
};

Group legacy(float d, bool has_shift, float shift) {
  return {.codes = {}, .scales = {d, d}, .shift = shift, .has_shift = has_shift};
}

int nibble(const uint8_t* p, int i) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; }

Group q4_0(const uint8_t* p) {
  Group g = legacy(f16_at(p), false, 0);
  for (int i = 0; i < 32; ++i) g.codes[i] = nibble(p + 2, i) - 8;
  return g;
}
Group q4_1(const uint8_t* p) {
  Group g = legacy(f16_at(p), true, f16_at(p + 2));
  for (int i = 0; i < 32; ++i) g.codes[i] = nibble(p + 4, i);
  return g;
}
Group q5_0(const uint8_t* p) {
  Group g = legacy(f16_at(p), false, 0);
  for (int i = 0; i < 32; ++i) g.codes[i] = (nibble(p + 6, i) | (p[2 + i / 8] >> i % 8 & 1) << 4) - 16;
  return g;
}
Group q5_1(const uint8_t* p) {
  Group g = legacy(f16_at(p), true, f16_at(p + 2));
  for (int i = 0; i < 32; ++i) g.codes[i] = nibble(p + 8, i) | (p[4 + i / 8] >> i % 8 & 1) << 4;
  return g;
}
Group q8_0(const uint8_t* p) {
  Group g = legacy(f16_at(p), false, 0);
  for (int i = 0; i < 32; ++i) g.codes[i] = (p[2 + i] ^ 0x80) - 0x80;  // two's complement
  return g;
}
constexpr int kIQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

Group iq4_nl(const uint8_t* p) {
  Group g = legacy(f16_at(p), false, 0);
  for (int i = 0; i < 32; ++i) g.codes[i] = kIQ4[nibble(p + 2, i)];
  return g;
}
// Scales and minima of Q4_K and Q5_K.
Group with_minimum(const uint8_t* p, int n) {
  const uint8_t* packed = p + 4;
  const int scale = n < 4 ? packed[n] & 63 : (packed[n + 4] & 15) | packed[n - 4] >> 6 << 4;
  const int least = n < 4 ? packed[n + 4] & 63 : packed[n + 4] >> 4 | packed[n] >> 6 << 4;
  return legacy(f16_at(p) * float(scale), true, -f16_at(p + 2) * float(least));
}
Group q4_k(const uint8_t* p, int n) {
  Group g = with_minimum(p, n);
  for (int i = 0; i < 32; ++i) g.codes[i] = p[16 + n / 2 * 32 + i] >> (n % 2 * 4) & 15;
  return g;
}
Group q5_k(const uint8_t* p, int n) {
  Group g = with_minimum(p, n);
  for (int i = 0; i < 32; ++i)
    g.codes[i] = (p[48 + n / 2 * 32 + i] >> (n % 2 * 4) & 15) | (p[16 + i] >> n & 1) << 4;
  return g;
}
Group q3_k(const uint8_t* p, int n) {
  Group g = legacy(0, false, 0);
  for (int half = 0; half < 2; ++half) {
    const int i = 2 * n + half;
    const int low = (i < 8 ? p[96 + i] : p[96 + i - 8] >> 4) & 15, high = p[104 + i % 4] >> (i / 4 * 2) & 3;
    g.scales[half] = f16_at(p + 108) * float((low | high << 4) - 32);
  }
  for (int i = 0; i < 32; ++i)
    g.codes[i] = ((p[32 + n / 4 * 32 + i] >> (n % 4 * 2) & 3) | (p[i] >> n & 1) << 2) - 4;
  return g;
}
Group iq4_xs(const uint8_t* p, int n) {
  const int low = p[4 + n / 2] >> (n % 2 * 4) & 15, high = word_at(p + 2) >> (2 * n) & 3;
  Group g = legacy(f16_at(p) * float((low | high << 4) - 32), false, 0);
  for (int i = 0; i < 32; ++i) g.codes[i] = kIQ4[nibble(p + 8 + n * 16, i)];
  return g;
}
Group q6_k(const uint8_t* p, int n) {
  const int half = n / 4, quarter = n % 4;
  const float d = f16_at(p + 208);
  const auto* scales = reinterpret_cast<const int8_t*>(p + 192 + n * 2);
  Group g = {.codes = {}, .scales = {d * float(scales[0]), d * float(scales[1])}, .shift = 0, .has_shift = false};
  for (int i = 0; i < 32; ++i) {
    const int low = p[half * 64 + quarter % 2 * 32 + i] >> (quarter / 2 * 4) & 15;
    const int high = p[128 + half * 32 + i] >> (quarter * 2) & 3;
    g.codes[i] = (low | high << 4) - 32;
  }
  return g;
}

Group group_of(WeightFormat format, const uint8_t* row, int64_t n) {
  switch (format) {
    case WeightFormat::kQ40:
      return q4_0(row + n * 18);
    case WeightFormat::kQ41:
      return q4_1(row + n * 20);
    case WeightFormat::kQ50:
      return q5_0(row + n * 22);
    case WeightFormat::kQ51:
      return q5_1(row + n * 24);
    case WeightFormat::kQ80:
      return q8_0(row + n * 34);
    case WeightFormat::kIQ4NL:
      return iq4_nl(row + n * 18);
    case WeightFormat::kQ3K:
      return q3_k(row + n / 8 * 110, int(n % 8));
    case WeightFormat::kQ4K:
      return q4_k(row + n / 8 * 144, int(n % 8));
    case WeightFormat::kQ5K:
      return q5_k(row + n / 8 * 176, int(n % 8));
    case WeightFormat::kQ6K:
      return q6_k(row + n / 8 * 210, int(n % 8));
    case WeightFormat::kIQ4XS:
      return iq4_xs(row + n / 8 * 136, int(n % 8));
  }
  return {};
}

int32_t dot(const int* a, const int8_t* b, int n) {
  int32_t sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

float one(const ProductCall& call, int64_t token, int64_t out) {
  const uint8_t* row = call.weights.data + out * call.weights.row_bytes;
  const Activations& x = call.x;
  float y = 0;
  for (int64_t n = 0; n < x.n_groups; ++n) {
    const int64_t at = token * x.n_groups + n;
    const Group g = group_of(call.weights.format, row, n);
    const int8_t* codes = x.codes + token * x.code_stride + n * kGroup;
    y = std::fma(g.scales[0] * float(dot(g.codes, codes, 32)), x.scales[at], y);
    if (g.has_shift) y = std::fma(g.shift, x.shifts[at], y);
  }
  return y;
}

// With a scale for every 16 elements; these parts, eight to 128 elements, are added in this order.
float one_by_halves(const ProductCall& call, int64_t token, int64_t out) {
  constexpr int kPlaces[8] = {0, 4, 2, 6, 1, 5, 3, 7};
  const uint8_t* row = call.weights.data + out * call.weights.row_bytes;
  const Activations& x = call.x;
  float y = 0;
  for (int64_t i = 0; i < 2 * x.n_groups; ++i) {
    const int64_t part = i / 8 * 8 + kPlaces[i % 8], n = part / 2, half = part % 2;
    const Group g = group_of(call.weights.format, row, n);
    const int8_t* codes = x.codes + token * x.code_stride + part * 16;
    y = std::fma(g.scales[half] * float(dot(g.codes + 16 * half, codes, 16)), x.scales[token * x.n_groups + n], y);
  }
  return y;
}

void product(const ProductCall& call) {
  const bool by_halves = call.weights.format == WeightFormat::kQ3K || call.weights.format == WeightFormat::kQ6K;
  const auto f = by_halves ? one_by_halves : one;
  for (int64_t token = call.token_begin; token < call.token_end; ++token)
    for (int64_t out = call.out_begin; out < call.out_end; ++out)
      call.y[token * call.y_stride + out] = f(call, token, out);
}

void quantize_group(const float* x, const Activations& to, int64_t token, int64_t g) {
  float largest = 0;
  bool finite = true;
  for (int i = 0; i < kGroup; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::fmax(largest, std::fabs(x[i]));
  }
  const bool some = finite && largest >= kLeast;
  const float factor = some ? 127.0f / largest : 0.0f;
  const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : some ? largest / 127.0f : 0.0f;
  int8_t* codes = to.codes + token * to.code_stride + g * kGroup;
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < kGroup; ++i) {
    codes[i] = some ? int8_t(std::nearbyint(x[i] * factor)) : int8_t{0};
    sums[i / 16] += codes[i];
  }
  const int64_t at = token * to.n_groups + g;
  to.scales[at] = scale;
  to.shifts[at] = scale * float(sums[0] + sums[1]);
  to.sums[at] = sums[0] + sums[1];
  to.half_sums[2 * at] = sums[0];
  to.half_sums[2 * at + 1] = sums[1];
}

void quantize_activations(const QuantizeCall& call) {
  for (int64_t token = call.token_begin; token < call.token_end; ++token)
    for (int64_t g = 0; g < call.to.n_groups; ++g)
      quantize_group(call.x + token * call.x_stride + g * kGroup, call.to, token, g);
}

}  // namespace

const IsaFunctions* scalar_functions() {
  static constexpr IsaFunctions kFunctions = {quantize_activations, product};
  return &kFunctions;
}

}  // namespace pagedkv::products
