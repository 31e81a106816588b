// Modes, quantization of rows, and the merge of attention states.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings.h"
#include "errors.h"
#include "pagedkv/attention.h"
#include "pagedkv/format.h"
#include "pagedkv/paged_kv_cache.h"

namespace pagedkv::python {
namespace {

Format one_format(Given<std::string> mode) { return check(parse_format(mode.read_as("mode"))); }

std::vector<int64_t> leading(const InArray& array, int ndim) {
  std::vector<int64_t> shape;
  for (int axis = 0; axis + 1 < ndim; ++axis) shape.push_back(array.extent(axis));
  return shape;
}

int rank_of(nb::handle array, const char* name) {
  nb::ndarray<nb::ro> view;
  if (!nb::try_cast(nb::borrow(array), view) || !view.is_valid()) InArray(array, name, {});
  return int(view.ndim());
}

// Any rank from 1 to 4, as the list of free extents that the array readers want.
template <class F>
auto with_rank(int rank, const char* name, const F& f) {
  switch (rank) {
    case 1:
      return f(Extents{kAny});
    case 2:
      return f(Extents{kAny, kAny});
    case 3:
      return f(Extents{kAny, kAny, kAny});
    case 4:
      return f(Extents{kAny, kAny, kAny, kAny});
  }
  raise(invalid_argument(std::string(name) + " has " + std::to_string(rank) + " axes, allowed are 1 to 4"));
}

Pair quantize(nb::handle x, Given<std::string> mode) {
  const Format format = one_format(mode);
  const int rank = rank_of(x, "x");
  return with_rank(rank, "x", [&](Extents extents) {
    const FloatsIn in(x, "x", extents, process_counters());
    const int64_t head_dim = in.array().extent(rank - 1);
    if (head_dim < 1) raise(invalid_argument("x has rows of 0 values"));
    QuantizedRows made = check(without_gil([&] {
      return quantize_symmetric({in.data(), size_t(in.array().size())}, head_dim, format);
    }));
    std::vector<int64_t> shape = leading(in.array(), rank), scale_shape = shape;
    shape.push_back(row_bytes(format, head_dim).n);
    scale_shape.push_back(1);
    auto scales = std::unique_ptr<float[]>(new float[made.scales.size() + 1]);
    std::memcpy(scales.get(), made.scales.data(), made.scales.size() * sizeof(float));
    const auto code = format == Format::kQ8 ? nb::dlpack::dtype_code::Int : nb::dlpack::dtype_code::UInt;
    const Framework framework = in.array().framework();
    return Pair(nb::make_tuple(byte_array(framework, std::move(made.codes), shape, {uint8_t(code), 8, 1}),
                               float_array(framework, std::move(scales), scale_shape)));
  });
}

nb::any dequantize(nb::handle codes, nb::handle scales, Given<int64_t> given, Given<std::string> mode) {
  const int64_t head_dim = given.read_as("head_dim");
  const Format format = one_format(mode);
  if (!is_quantized(format))
    raise(invalid_argument(std::string("[dequantize_symmetric] ") + format_name(format) +
                           " is not a quantized format; those are q8, q6, q4"));
  check(check_head_dim(format, head_dim));
  const int rank = rank_of(codes, "codes");
  return with_rank(rank, "codes", [&](Extents extents) {
    const InArray in(codes, "codes", extents);
    if (in.dtype().bits != 8)
      raise_type_error("codes have elements of type " + in.dtype_name() + ", expected int8 or uint8");
    if (!in.contiguous()) raise(invalid_argument("codes are not contiguous"));
    if (in.extent(rank - 1) != row_bytes(format, head_dim).n)
      raise(invalid_argument("codes have rows of " + std::to_string(in.extent(rank - 1)) + " bytes, " +
                             format_name(format) + " of head_dim " + std::to_string(head_dim) + " has " +
                             std::to_string(row_bytes(format, head_dim).n)));
    std::vector<int64_t> shape = leading(in, rank);
    int64_t n_rows = 1;
    for (const int64_t extent : shape) n_rows *= extent;
    // Scales come as [..., 1] or [...]; only their number matters.
    QuantizedRows rows;
    const int scale_rank = rank_of(scales, "scales");
    with_rank(scale_rank, "scales", [&](Extents scale_extents) {
      const FloatsIn read(scales, "scales", scale_extents, process_counters());
      if (read.array().size() != n_rows)
        raise(invalid_argument("scales are " + std::to_string(read.array().size()) + ", the codes have " +
                               std::to_string(n_rows) + " rows"));
      rows.scales.assign(read.data(), read.data() + n_rows);
    });
    const auto* bytes = static_cast<const std::byte*>(in.data());
    rows.codes.assign(bytes, bytes + in.size());
    const std::vector<float> values =
        check(without_gil([&] { return dequantize_symmetric(rows, head_dim, format); }));
    auto out = std::unique_ptr<float[]>(new float[values.size() + 1]);
    std::memcpy(out.get(), values.data(), values.size() * sizeof(float));
    shape.push_back(head_dim);
    return nb::borrow<nb::any>(float_array(in.framework(), std::move(out), shape));
  });
}

Pair merge(nb::handle out_a, nb::handle lse_a, nb::handle out_b, nb::handle lse_b) {
  const FloatsIn a(out_a, "out_a", {kAny, kAny, kAny}, process_counters());
  const int64_t n = a.array().extent(0), heads = a.array().extent(1), dim = a.array().extent(2);
  const FloatsIn b(out_b, "out_b", {n, heads, dim}, process_counters());
  const FloatsIn la(lse_a, "lse_a", {n, heads}, process_counters());
  const FloatsIn lb(lse_b, "lse_b", {n, heads}, process_counters());
  FloatsOut out({n, heads, dim}, a.array(), nb::none(), "out", process_counters());
  auto lse = std::unique_ptr<float[]>(new float[size_t(n * heads + 1)]);
  without_gil([&] {
    std::memcpy(out.data(), a.data(), size_t(n * heads * dim) * sizeof(float));
    std::memcpy(lse.get(), la.data(), size_t(n * heads) * sizeof(float));
    merge_states(out.data(), lse.get(), b.data(), lb.data(), n * heads, dim);
  });
  return Pair(nb::make_tuple(out.finish(), float_array(a.array().framework(), std::move(lse), {n, heads})));
}

}  // namespace

void bind_formats(nb::module_& m) {
  m.def(
      "parse_kv_quant", [](const std::string& mode) { return kv_quant_name(check(parse_kv_quant(mode))); },
      nb::arg("mode"), "The mode's own name ('q8', 'f16', 'q8:q4'). ValueError lists the modes.");
  m.def(
      "is_foreign_spelling", [](const std::string& mode) { return is_foreign_spelling(mode); }, nb::arg("mode"));
  m.def("kv_quant_from_env", [] { return kv_quant_name(check(kv_quant_from_env())); });
  m.def(
      "dynamic_from_env",
      [](bool otherwise) { return check(paged_kv_options_from_env({.dynamic = otherwise})).dynamic; },
      nb::arg("otherwise"));
  m.def(
      "bytes_per_token",
      [](Given<std::string> kv_quant, Given<int64_t> num_kv_heads, Given<int64_t> head_dim,
         Given<int64_t> head_dim_v) {
        LayerShape shape{num_kv_heads.read_as("num_kv_heads"), head_dim.read_as("head_dim")};
        shape.head_dim_v = head_dim_v.value.is_none() ? shape.head_dim_k : head_dim_v.read_as("head_dim_v");
        read({"kv_quant", kv_quant.value}, shape.formats);
        check(check_head_dim(shape.formats.k, shape.head_dim_k));
        check(check_head_dim(shape.formats.v, shape.head_dim_v));
        return bytes_per_token(shape).n;
      },
      nb::arg("kv_quant").none(), nb::arg("num_kv_heads").none(), nb::arg("head_dim").none(),
      nb::arg("head_dim_v") = nb::none(),
      nb::sig("def bytes_per_token(kv_quant: str, num_kv_heads: int, head_dim: int, "
              "head_dim_v: int | None = None) -> int"),
      "Bytes that one token takes in one layer: K and V rows and their scales, without padding.");
  m.def("quantize_symmetric", &quantize, nb::arg("x").none(), nb::arg("mode").none() = "q8",
        nb::sig("def quantize_symmetric(x: object, mode: str = 'q8') -> tuple[typing.Any, typing.Any]"),
        "Quantizes rows, one scale each, to the bytes that a cache stores.\n\n"
        "  x        [..., head_dim] floats, 1 to 4 axes\n"
        "  returns  codes [..., row_bytes] (int8 for q8, else uint8), scales [..., 1] float32\n\n"
        "Errors: ValueError (mode), NotFiniteError with the row.");
  m.def("dequantize_symmetric", &dequantize, nb::arg("codes").none(), nb::arg("scales").none(),
        nb::arg("head_dim").none(), nb::arg("mode").none() = "q8",
        nb::sig("def dequantize_symmetric(codes: object, scales: object, head_dim: int, mode: str = 'q8') "
                "-> typing.Any"),
        "The inverse: [..., head_dim] float32.");
  m.def("merge", &merge, nb::arg("out_a").none(), nb::arg("lse_a").none(), nb::arg("out_b").none(),
        nb::arg("lse_b").none(),
        "Joins attention over disjoint keys.\n\n"
        "  out_a, out_b  [n_tokens, num_q_heads, head_dim]\n"
        "  lse_a, lse_b  [n_tokens, num_q_heads], natural logarithm, -inf for a row that saw no key\n"
        "  returns       out, lse of the same shapes\n\n"
        "Source: FlashInfer, arXiv 2501.01005, section 2.2 (there with base-2 logarithms).");
}

}  // namespace pagedkv::python
