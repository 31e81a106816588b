#include "pagedkv/format.h"

#include <algorithm>
#include <iterator>

namespace pagedkv {
namespace {

struct Spelling {
  std::string_view word;
  Format format;
};

// Every accepted mode, lower case with '_'. "off" is f16: what an unquantized cache stores.
constexpr Spelling kSpellings[] = {
    {"", Format::kF16},         {"off", Format::kF16},     {"none", Format::kF16}, {"false", Format::kF16},
    {"0", Format::kF16},        {"disable", Format::kF16}, {"f16", Format::kF16},  {"auto", Format::kF16},
    {"disabled", Format::kF16}, {"bf16", Format::kBF16},   {"f32", Format::kF32},  {"q8", Format::kQ8},
    {"8", Format::kQ8},         {"8bit", Format::kQ8},     {"int8", Format::kQ8},  {"uint8", Format::kQ8},
    {"q8_0", Format::kQ8},      {"q6", Format::kQ6},       {"6", Format::kQ6},     {"6bit", Format::kQ6},
    {"int6", Format::kQ6},      {"uint6", Format::kQ6},    {"q4", Format::kQ4},    {"4", Format::kQ4},
    {"4bit", Format::kQ4},      {"int4", Format::kQ4},     {"uint4", Format::kQ4}, {"q4_0", Format::kQ4},
};

// Lower case, '-' as '_', without surrounding blanks. ASCII alone, whatever the locale.
std::string normalized(std::string_view mode) {
  constexpr std::string_view kBlanks = " \t\r\n";
  const size_t first = mode.find_first_not_of(kBlanks);
  if (first == std::string_view::npos) return {};
  std::string word(mode.substr(first, mode.find_last_not_of(kBlanks) - first + 1));
  std::transform(word.begin(), word.end(), word.begin(), [](char c) {
    return c == '-' ? '_' : c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
  });
  return word;
}

}  // namespace

const char* format_name(Format format) {
  switch (format) {
    case Format::kF32:
      return "f32";
    case Format::kF16:
      return "f16";
    case Format::kBF16:
      return "bf16";
    case Format::kQ8:
      return "q8";
    case Format::kQ6:
      return "q6";
    case Format::kQ4:
      return "q4";
  }
  return "unknown";
}

bool is_quantized(Format format) { return format == Format::kQ8 || format == Format::kQ6 || format == Format::kQ4; }

Bytes row_bytes(Format format, int64_t head_dim) {
  switch (format) {
    case Format::kF32:
      return Bytes(head_dim * 4);
    case Format::kF16:
    case Format::kBF16:
      return Bytes(head_dim * 2);
    case Format::kQ8:
      return Bytes(head_dim);
    case Format::kQ6:
      return Bytes(head_dim / 4 * 3);
    case Format::kQ4:
      return Bytes((head_dim + 1) / 2);
  }
  return Bytes(0);
}

Bytes scale_bytes(Format format) { return Bytes(is_quantized(format) ? 4 : 0); }

Status check_head_dim(Format format, int64_t head_dim) {
  if (head_dim < 1)
    return invalid_argument("[format] head_dim is " + std::to_string(head_dim) + ", must be at least 1");
  if (format == Format::kQ6 && head_dim % 4 != 0) {
    return invalid_argument("[format] head_dim is " + std::to_string(head_dim) + ", q6 needs a multiple of 4");
  }
  return {};
}

Result<Format> parse_format(std::string_view mode) {
  const std::string word = normalized(mode);
  for (const Spelling& spelling : kSpellings) {
    if (spelling.word == word) return spelling.format;
  }
  return invalid_argument("[kv-quant] unknown mode '" + std::string(mode) +
                          "'; modes are off (f16), f32, bf16, q8, q6, q4, auto, or K:V with two of them");
}

Result<KvQuantConfig> parse_kv_quant(std::string_view mode) {
  const size_t colon = mode.find(':');
  if (colon == std::string_view::npos) {
    const Result<Format> both = parse_format(mode);
    if (!both.ok()) return both.status();
    return KvQuantConfig{.k = *both, .v = *both};
  }
  const std::string_view halves[] = {mode.substr(0, colon), mode.substr(colon + 1)};
  for (std::string_view half : halves) {
    if (normalized(half).empty()) {
      return invalid_argument("[kv-quant] '" + std::string(mode) + "' lacks a mode beside its ':'; K:V needs both");
    }
  }
  const Result<Format> k = parse_format(halves[0]), v = parse_format(halves[1]);
  if (!k.ok()) return k.status();
  if (!v.ok()) return v.status();
  return KvQuantConfig{.k = *k, .v = *v};
}

bool is_foreign_spelling(std::string_view mode) {
  const size_t colon = mode.find(':');
  if (colon != std::string_view::npos) {
    return is_foreign_spelling(mode.substr(0, colon)) || is_foreign_spelling(mode.substr(colon + 1));
  }
  const std::string word = normalized(mode);
  return word == "q8_0" || word == "q4_0";
}

std::string kv_quant_name(const KvQuantConfig& config) {
  std::string name = format_name(config.k);
  if (config.k != config.v) name = name + ":" + format_name(config.v);
  return name;
}

Bytes bytes_per_token(const LayerShape& shape) {
  const Bytes head = row_bytes(shape.formats.k, shape.head_dim_k) + scale_bytes(shape.formats.k) +
                     row_bytes(shape.formats.v, shape.head_dim_v) + scale_bytes(shape.formats.v);
  return head * shape.num_kv_heads;
}

}  // namespace pagedkv
