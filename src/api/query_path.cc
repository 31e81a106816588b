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

ProductPaths choose_paths(QueryPath asked, const GroupSpec& group) {
  if (asked == QueryPath::kF32) return {};
  return {.k_codes = is_quantized(group.shape.formats.k), .v_codes = is_quantized(group.shape.formats.v)};
}

}  // namespace pagedkv
