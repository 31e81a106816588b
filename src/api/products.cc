// The public face of src/products: checks, the layout of quantized vectors, and who computes what.
#include "pagedkv/products.h"

#include <algorithm>
#include <utility>

#include "api/isa.h"
#include "base/text.h"
#include "products/products.h"

namespace pagedkv {
namespace {

using products::kFewTokens;
using products::kGroup;
using products::kPanelRows;

struct FormatRow {
  std::string_view name;
  int64_t elements;
  int64_t bytes;
};
constexpr FormatRow kFormats[] = {{"Q4_0", 32, 18},   {"Q4_1", 32, 20},   {"Q5_0", 32, 22},    {"Q5_1", 32, 24},
                                  {"Q8_0", 32, 34},   {"IQ4_NL", 32, 18}, {"Q3_K", 256, 110},  {"Q4_K", 256, 144},
                                  {"Q5_K", 256, 176}, {"Q6_K", 256, 210}, {"IQ4_XS", 256, 136}};
constexpr WeightFormat kWeightFormats[] = {WeightFormat::kQ40, WeightFormat::kQ41,  WeightFormat::kQ50,
                                           WeightFormat::kQ51, WeightFormat::kQ80,  WeightFormat::kIQ4NL,
                                           WeightFormat::kQ3K, WeightFormat::kQ4K,  WeightFormat::kQ5K,
                                           WeightFormat::kQ6K, WeightFormat::kIQ4XS};
static_assert(std::size(kFormats) == std::size(kWeightFormats));
constexpr int64_t kFewRows = kPanelRows / 2;  // that a part of few tokens is counted in
constexpr int64_t kFewestTokensOfAPart = 48;  // fewer would unpack weights more often than is worth it
constexpr int64_t kMostPieces = 16;           // that tokens are cut into

const FormatRow& row_of(WeightFormat format) { return kFormats[size_t(format)]; }

// Whole cache lines, and one more: columns of a power of two would fall into the same sets of the cache.
int64_t code_stride(int64_t n_in) { return (n_in + 63) / 64 * 64 + 64; }

products::Activations layout(std::byte* at, int64_t n_in, int64_t n_tokens) {
  products::Activations x{.code_stride = code_stride(n_in), .n_groups = n_in / kGroup, .n_tokens = n_tokens};
  const int64_t n = n_tokens * x.n_groups;
  x.codes = reinterpret_cast<int8_t*>(at);
  x.scales = reinterpret_cast<float*>(at + n_tokens * x.code_stride);
  x.shifts = x.scales + n;
  x.sums = reinterpret_cast<int32_t*>(x.shifts + n);
  x.half_sums = x.sums + n;
  return x;
}

std::pair<int64_t, int64_t> share_of(int64_t n, Part part) {
  return {n * part.index / part.count, n * (part.index + 1) / part.count};
}

// How often the tokens are cut so that panels times pieces come out even over the parts: the least number that
// leaves a tenth of the time or less to waiting.
int64_t pieces_of(int64_t n_panels, int64_t n_tokens, int64_t n_parts) {
  const int64_t most = std::clamp<int64_t>(n_tokens / kFewestTokensOfAPart, 1, kMostPieces);
  int64_t best = 1;
  double least = 0;
  for (int64_t pieces = 1; pieces <= most; ++pieces) {
    const int64_t n = n_panels * pieces, longest = (n + n_parts - 1) / n_parts;
    const double used = double(n) / double(longest * n_parts);
    if (used > least) best = pieces, least = used;
    if (used >= 0.9) break;
  }
  return best;
}

void multiply_few(const products::Entry& entry, products::ProductCall call, Part part) {
  const auto [begin, end] = share_of((call.weights.n_out + kFewRows - 1) / kFewRows, part);
  call.out_begin = begin * kFewRows;
  call.out_end = std::min(end * kFewRows, call.weights.n_out);
  call.token_end = call.x.n_tokens;
  entry.product(call);
}

void multiply_many(const products::Entry& entry, products::ProductCall call, Part part) {
  const int64_t n_panels = (call.weights.n_out + kPanelRows - 1) / kPanelRows;
  const int64_t n_pieces = pieces_of(n_panels, call.x.n_tokens, part.count);
  auto [at, end] = share_of(n_panels * n_pieces, part);
  while (at < end) {  // the rest of one piece at a time
    const int64_t piece = at / n_panels, first = at % n_panels, n = std::min(n_panels - first, end - at);
    call.token_begin = call.x.n_tokens * piece / n_pieces;
    call.token_end = call.x.n_tokens * (piece + 1) / n_pieces;
    call.out_begin = first * kPanelRows;
    call.out_end = std::min((first + n) * kPanelRows, call.weights.n_out);
    entry.product(call);
    at += n;
  }
}

}  // namespace

std::span<const WeightFormat> weight_formats() { return kWeightFormats; }
std::string_view weight_format_name(WeightFormat format) { return row_of(format).name; }
int64_t weight_block_elements(WeightFormat format) { return row_of(format).elements; }
int64_t weight_block_bytes(WeightFormat format) { return row_of(format).bytes; }
int64_t weight_row_bytes(WeightFormat format, int64_t n_in) {
  return n_in / row_of(format).elements * row_of(format).bytes;
}

Result<MatrixProducts> MatrixProducts::create(const std::string& isa) {
  const auto kernel = choose_entry(isa);
  if (!kernel.ok()) return kernel.status();
  // NEON has no products of its own yet.
  const products::Entry* entry = products::find_entry((*kernel)->name);
  return MatrixProducts(entry != nullptr ? entry : products::find_entry("scalar"));
}

std::string_view MatrixProducts::isa() const { return entry_->name; }
bool MatrixProducts::fast() const { return entry_->name != "scalar"; }

bool MatrixProducts::takes(WeightFormat format, int64_t n_out, int64_t n_in) {
  return n_out >= kPanelRows && n_in > 0 && n_in % row_of(format).elements == 0;
}

int64_t MatrixProducts::quantized_bytes(int64_t n_in, int64_t n_tokens) {
  return n_tokens * (code_stride(n_in) + n_in / kGroup * 5 * int64_t{sizeof(float)});
}

int64_t MatrixProducts::scratch_bytes() { return products::kScratchBytes; }

Status MatrixProducts::quantize(const float* x, int64_t x_stride, int64_t n_in, int64_t n_tokens, std::byte* to,
                                Part part) const {
  if (n_in <= 0 || n_in % kGroup != 0)
    return invalid_argument(str("[products] vectors of ", n_in, " elements; a multiple of ", kGroup, " is needed"));
  const auto [begin, end] = share_of(n_tokens, part);
  entry_->quantize(
      {.x = x, .x_stride = x_stride, .to = layout(to, n_in, n_tokens), .token_begin = begin, .token_end = end});
  return {};
}

Status MatrixProducts::multiply(const Call& call, Part part) const {
  const WeightMatrix& w = call.weight;
  if (!takes(w.format, w.n_out, w.n_in) || w.row_bytes < weight_row_bytes(w.format, w.n_in))
    return invalid_argument(str("[products] a weight of ", w.n_out, " x ", w.n_in, " in ",
                                std::string(row_of(w.format).name), " with rows of ", w.row_bytes,
                                " bytes: at least ", kPanelRows, " rows of whole blocks are needed"));
  products::ProductCall out{.weights = {.data = reinterpret_cast<const uint8_t*>(w.data),
                                        .row_bytes = w.row_bytes,
                                        .n_out = w.n_out,
                                        .n_in = w.n_in,
                                        .format = w.format},
                            .x = layout(const_cast<std::byte*>(call.x), w.n_in, call.n_tokens),
                            .y = call.y,
                            .y_stride = call.y_stride,
                            .scratch = call.scratch};
  if (call.n_tokens <= kFewTokens)
    multiply_few(*entry_, out, part);
  else
    multiply_many(*entry_, out, part);
  return {};
}

}  // namespace pagedkv
