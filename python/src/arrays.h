// Arrays of any framework, in and out: without a copy where the layout allows it, counted where it does not.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pagedkv/attention.h"
#include "pagedkv/format.h"
#include "pagedkv/layout.h"

namespace pagedkv::python {

namespace nb = nanobind;

// How arrays crossed the border. Touched with the GIL held.
struct ArrayCounters {
  int64_t zero_copy = 0;
  std::map<std::string, int64_t> copied;  // why -> arrays
};
// What comes out, as type checkers see it.
using Pair = nb::typed<nb::tuple, nb::any, nb::any>;
using Figures = nb::typed<nb::dict, nb::str, nb::any>;
ArrayCounters& process_counters();  // of the functions that belong to no cache
Figures to_dict(const ArrayCounters& counters);

enum class Framework : uint8_t { kNumpy, kTorch, kMlx, kJax, kOther };

// Which extents are wanted; kAny: whatever comes.
inline constexpr int64_t kAny = -1;
using Extents = std::initializer_list<int64_t>;

// An array that was handed in: borrowed, readable, in CPU memory.
class InArray {
 public:
  // Errors: TypeError (no array, another device), ValueError (shape), both naming `name` and what was found.
  InArray(nb::handle array, const char* name, Extents extents);
  InArray(nb::handle array, const char* name);  // of any shape
  int ndim() const { return view_.ndim; }
  int64_t extent(int axis) const { return view_.shape[axis]; }
  int64_t stride(int axis) const { return view_.strides[axis]; }  // elements
  int64_t size() const;
  const void* data() const { return static_cast<const std::byte*>(view_.data) + view_.byte_offset; }
  nb::dlpack::dtype dtype() const { return view_.dtype; }
  std::string dtype_name() const;
  bool is(nb::dlpack::dtype_code code, int bits) const {
    return dtype().code == uint8_t(code) && dtype().bits == bits && dtype().lanes == 1;
  }
  // float32, float16, bfloat16. Errors: TypeError for any other.
  ElementType element_type() const;
  bool is_double() const { return is(nb::dlpack::dtype_code::Float, 64); }
  bool contiguous() const;
  const char* name() const { return name_; }
  Framework framework() const { return framework_; }

 private:
  nb::dlpack::dltensor view_;
  nb::object object_;             // keeps what view_ points to, or
  nb::ndarray<nb::ro> imported_;  // this does
  const char* name_;
  Framework framework_;
};

// Rows of tokens, as [n_tokens, num_heads, head_dim] or with a batch as [batch, num_heads, n, head_dim]: then the
// tokens of a batch row follow each other, n_tokens = batch * n.
struct TokenRows {
  int64_t n_tokens = 0, num_heads = 0, head_dim = 0;
  int64_t token_stride = 0, head_stride = 0, dim_stride = 0;  // elements
  bool uniform = true;                                        // false: no one stride leads from token to token
  int64_t batch = 0;                                          // 0: no batch axis
};
// Errors: ValueError for other shapes than those two with these extents (kAny: any).
TokenRows token_rows(const InArray& array, int64_t n_tokens, int64_t num_heads, int64_t head_dim);
// All of them as dense floats [n_tokens, num_heads, head_dim].
void copy_rows(const InArray& array, float* out);

// Rows of keys or values.
class RowsIn {
 public:
  RowsIn(nb::handle array, const char* name, int64_t n_tokens, int64_t num_heads, int64_t head_dim,
         ArrayCounters& counters);
  KvRows rows() const { return rows_; }
  int64_t n_tokens() const { return shape_.n_tokens; }
  int64_t num_heads() const { return shape_.num_heads; }
  int64_t head_dim() const { return shape_.head_dim; }

 private:
  InArray array_;
  TokenRows shape_;
  std::vector<float> copy_;
  KvRows rows_;
};

// Queries as attention reads them: float32 with dense heads; tokens may be apart.
class QueriesIn {
 public:
  QueriesIn(nb::handle array, int64_t n_tokens, int64_t num_heads, int64_t head_dim, ArrayCounters& counters);
  const float* data() const { return data_; }
  int64_t token_stride() const { return token_stride_; }  // elements; 0: dense
  const InArray& array() const { return array_; }
  const TokenRows& shape() const { return shape_; }

 private:
  InArray array_;
  TokenRows shape_;
  std::unique_ptr<float[]> copy_;
  const float* data_ = nullptr;
  int64_t token_stride_ = 0;
};

// Any array of floats as dense float32, row-major.
class FloatsIn {
 public:
  FloatsIn(nb::handle array, const char* name, Extents extents, ArrayCounters& counters);
  const float* data() const { return data_; }
  const InArray& array() const { return array_; }

 private:
  InArray array_;
  std::vector<float> copy_;
  const float* data_ = nullptr;
};

// Integers as int32 or int64, from an array or any Python sequence.
template <class Int>
class IntsIn {
 public:
  // Errors: TypeError, ValueError (shape, out of range).
  IntsIn(nb::handle array, const char* name, Extents extents);
  const Int* data() const { return data_; }
  int64_t size() const { return size_; }
  int64_t extent(int axis) const { return extents_[size_t(axis)]; }

 private:
  nb::object keep_;
  std::unique_ptr<InArray> array_;
  std::vector<Int> copy_;
  std::vector<int64_t> extents_;
  const Int* data_ = nullptr;
  int64_t size_ = 0;
};

// A float32 result that is computed here and leaves as an array of `like`'s framework and float type, or goes into
// the caller's `out` (then that object is returned).
class FloatsOut {
 public:
  // out: None or a writable array of this shape. Errors: TypeError, ValueError.
  FloatsOut(std::vector<int64_t> shape, const InArray& like, nb::handle out, const char* out_name,
            ArrayCounters& counters);
  // For rows of tokens, [n_tokens, num_heads, head_dim]; with a batch, the array that leaves shows them as
  // [batch, num_heads, n, head_dim], by strides.
  FloatsOut(const TokenRows& like_rows, int64_t head_dim, const InArray& like, nb::handle out, const char* out_name,
            ArrayCounters& counters);
  float* data() { return data_; }
  nb::object finish();  // converts where the type is not float32; call once

 private:
  std::vector<int64_t> shape_;
  Framework framework_;
  ElementType type_;
  std::vector<int64_t> strides_;  // of the array that leaves; empty: dense
  int64_t n_;
  std::unique_ptr<float[]> owned_;
  float* data_ = nullptr;
  nb::object out_;          // the caller's array
  nb::ndarray<> out_view_;  // of it
};

// A view of a block tensor. `owner` lives as long as the view.
nb::object block_tensor(const TensorView& view, Format format, bool scales, nb::handle owner);
// One side's block tensor in somebody else's memory. Errors: TypeError (elements that no format has, not writable).
struct BlockTensorIn {
  TensorView view;
  nb::dlpack::dtype dtype;
  nb::ndarray<nb::ro> readable;  // keeps the memory alive
  nb::ndarray<> writable;
};
BlockTensorIn block_tensor_in(nb::handle array, const char* name, bool writable);

// Dense float32 [shape] that owns its memory, in a framework's own array.
nb::object float_array(Framework framework, std::unique_ptr<float[]> data, const std::vector<int64_t>& shape,
                       const std::vector<int64_t>& strides = {});
nb::object byte_array(Framework framework, std::vector<std::byte> data, const std::vector<int64_t>& shape,
                      nb::dlpack::dtype dtype, const std::vector<int64_t>& strides = {});

std::string shape_text(const std::vector<int64_t>& shape);

}  // namespace pagedkv::python
