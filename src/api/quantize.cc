// The public quantize and dequantize: the kernels' own, so that the bytes are those of the store.
#include <string>

#include "base/check.h"
#include "kernels/kernels.h"
#include "pagedkv/format.h"

namespace pagedkv {
namespace {

Status check(std::string_view what, size_t n_values, int64_t head_dim, Format format) {
  std::string name = "[";
  name.append(what).append("] ");
  if (!is_quantized(format)) {
    return invalid_argument(name + format_name(format) + " is not a quantized format; those are q8, q6, q4");
  }
  if (Status s = check_head_dim(format, head_dim); !s.ok()) return s;
  if (head_dim > kernels::kMaxHeadDim) {
    return invalid_argument(name + "head_dim is " + std::to_string(head_dim) + ", the limit is " +
                            std::to_string(kernels::kMaxHeadDim));
  }
  if (n_values % size_t(head_dim) != 0) {
    return invalid_argument(name + std::to_string(n_values) + " values are not whole rows of head_dim " +
                            std::to_string(head_dim));
  }
  return {};
}

const kernels::Entry& best_entry() {
  const kernels::Entry* entry = kernels::find_entry({});
  PKV_CHECK(entry != nullptr);  // the scalar one runs everywhere
  return *entry;
}

}  // namespace

Result<QuantizedRows> quantize_symmetric(std::span<const float> x, int64_t head_dim, Format format) {
  if (Status s = check("quantize_symmetric", x.size(), head_dim, format); !s.ok()) return s;
  const int64_t n_rows = int64_t(x.size()) / head_dim;
  QuantizedRows rows;
  rows.codes.resize(size_t(n_rows * row_bytes(format, head_dim).n));
  rows.scales.resize(size_t(n_rows));
  const int64_t bad =
      best_entry().quantize(x.data(), n_rows, head_dim, format, rows.codes.data(), rows.scales.data());
  if (bad >= 0)
    return Status(Code::kNotFinite, "[quantize_symmetric] NaN or infinity in row " + std::to_string(bad));
  return rows;
}

Result<std::vector<float>> dequantize_symmetric(const QuantizedRows& rows, int64_t head_dim, Format format) {
  if (Status s = check("dequantize_symmetric", 0, head_dim, format); !s.ok()) return s;
  const int64_t n_rows = int64_t(rows.scales.size());
  const int64_t expected = n_rows * row_bytes(format, head_dim).n;
  if (int64_t(rows.codes.size()) != expected) {
    return invalid_argument("[dequantize_symmetric] " + std::to_string(rows.codes.size()) + " bytes of codes, " +
                            std::to_string(n_rows) + " scales need " + std::to_string(expected));
  }
  std::vector<float> out(size_t(n_rows * head_dim));
  best_entry().dequantize(rows.codes.data(), rows.scales.data(), n_rows, head_dim, format, out.data());
  return out;
}

}  // namespace pagedkv
