#include "api/query_path.h"

#include "base/text.h"

namespace pagedkv {

const char* query_path_name(QueryPath path) {
  switch (path) {
    case QueryPath::kAuto:
      return "auto";
    case QueryPath::kF32:
      return "f32";
    case QueryPath::kInt8:
      return "int8";
  }
  return "?";
}

Result<QueryPath> parse_query_path(std::string_view word) {
  for (const QueryPath path : {QueryPath::kAuto, QueryPath::kF32, QueryPath::kInt8})
    if (word == query_path_name(path)) return path;
  return invalid_argument(str("[attend] query path \"", word, "\" is not one of auto, f32, int8"));
}

ProductPaths choose_paths(QueryPath asked, const KvQuantConfig& formats, int64_t q_heads_per_kv_head,
                          const kernels::Entry& entry) {
  if (asked == QueryPath::kF32) return {};
  // Two planes of codes (q8) pay where an instruction adds up products of bytes; elsewhere only for one or two
  // query rows, which leave little to share of what f32 spends on decoding. docs/decisions/0008 has the figures.
  const bool few_rows = q_heads_per_kv_head == 1 || q_heads_per_kv_head == 2;
  const auto by_codes = [&](Format format) {
    if (!is_quantized(format)) return false;
    return asked == QueryPath::kInt8 || format != Format::kQ8 || entry.has_byte_dots || few_rows;
  };
  return {.k_codes = by_codes(formats.k), .v_codes = by_codes(formats.v)};
}

}  // namespace pagedkv
