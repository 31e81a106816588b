// How K and V rows are stored, and the one place that knows how many bytes that takes.
//
// A row is the head_dim values of one (token, KV head). Definitions: docs/formats.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "pagedkv/export.h"
#include "pagedkv/status.h"
#include "pagedkv/units.h"

namespace pagedkv {

enum class Format : uint8_t { kF32, kF16, kBF16, kQ8, kQ6, kQ4 };
inline constexpr Format kAllFormats[] = {Format::kF32, Format::kF16, Format::kBF16,
                                         Format::kQ8,  Format::kQ6,  Format::kQ4};

PKV_API const char* format_name(Format format);  // "f32", "f16", "bf16", "q8", "q6", "q4"
PKV_API bool is_quantized(Format format);        // q8, q6, q4: rows carry one f32 scale each

// Bytes of one packed row, without its scale. Requires: head_dim >= 1 and supported by the format.
PKV_API Bytes row_bytes(Format format, int64_t head_dim);
// Bytes of one row's scale: 4 for quantized formats, else 0.
PKV_API Bytes scale_bytes(Format format);
// kInvalidArgument if the format cannot hold rows of this head_dim (q6 needs a multiple of 4).
PKV_API Status check_head_dim(Format format, int64_t head_dim);

// Formats of keys and of values.
struct KvQuantConfig {
  Format k = Format::kF16;
  Format v = Format::kF16;
  bool operator==(const KvQuantConfig&) const = default;
};

// One mode, any case, '-' equals '_': off and its spellings (f16), f32, bf16, q8, q6, q4 and theirs, auto (off).
// Errors: kInvalidArgument that lists the modes.
PKV_API Result<Format> parse_format(std::string_view mode);
// "MODE" or "K:V".
PKV_API Result<KvQuantConfig> parse_kv_quant(std::string_view mode);
// True for spellings such as q8_0 that name another layout elsewhere (ggml's groups of 32): worth one notice.
PKV_API bool is_foreign_spelling(std::string_view mode);
PKV_API std::string kv_quant_name(const KvQuantConfig& config);  // "q8", or "q8:q4" when K and V differ

// Reads PAGEDKV_QUANT, then MTPLX_VLLM_METAL_PAGED_KV_QUANT, then MTPLX_PAGED_KV_QUANT. Unset or empty: off.
PKV_API Result<KvQuantConfig> kv_quant_from_env();

// The shape of one layer's K and V.
struct LayerShape {
  int64_t num_kv_heads = 0;
  int64_t head_dim_k = 0;
  int64_t head_dim_v = 0;
  KvQuantConfig formats;
  bool operator==(const LayerShape&) const = default;
};

// Bytes that one token takes in one layer: K and V rows and their scales, without padding. Every other figure
// (image size, pool size, the tables of `pagedkv inspect`) derives from this function.
PKV_API Bytes bytes_per_token(const LayerShape& shape);

// Symmetric quantization, one scale a row: scale = max(max|x| / qmax, 1e-6), code = clip(round(x / scale)).
// The bytes are those that the cache stores.
struct QuantizedRows {
  std::vector<std::byte> codes;  // [n_rows, row_bytes]
  std::vector<float> scales;     // [n_rows]
};
//   x  [n_rows, head_dim]
// Errors: kInvalidArgument (not a quantized format, size not a multiple of head_dim), kNotFinite with the row.
PKV_API Result<QuantizedRows> quantize_symmetric(std::span<const float> x, int64_t head_dim, Format format);
// The inverse: (code - bias) * scale, [n_rows, head_dim].
PKV_API Result<std::vector<float>> dequantize_symmetric(const QuantizedRows& rows, int64_t head_dim, Format format);

}  // namespace pagedkv
