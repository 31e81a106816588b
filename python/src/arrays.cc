#include "arrays.h"

#include <nanobind/stl/string.h>

#include <bit>
#include <cstring>
#include <limits>
#include <optional>

#include "errors.h"

namespace pagedkv::python {
namespace {

using Code = nb::dlpack::dtype_code;

constexpr nb::dlpack::dtype dtype_of(Code code, int bits) { return {uint8_t(code), uint8_t(bits), 1}; }

std::string dtype_text(nb::dlpack::dtype dtype) {
  static constexpr const char* kNames[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
  const std::string name =
      dtype.code < std::size(kNames) ? kNames[dtype.code] : "code " + std::to_string(dtype.code);
  return dtype.code == uint8_t(Code::Bool) ? name : name + std::to_string(dtype.bits);
}

std::string type_text(nb::handle object) {
  return nb::cast<std::string>(nb::str(object.type().attr("__qualname__")));
}

// The root of the module that the type comes from: "numpy", "torch", ...
std::string root_module(PyTypeObject* type) {
  const nb::object module = nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__module__", nb::none());
  if (!nb::isinstance<nb::str>(module)) return {};
  const std::string name = nb::cast<std::string>(module);
  return name.substr(0, name.find('.'));
}

// DLPack's table of C functions (DLPack 1.3, DLPackExchangeAPI), which a type may have as
// __dlpack_c_exchange_api__: with it an array is looked at without a call into Python.
struct ExchangeApi {
  uint32_t major_version, minor_version;
  const ExchangeApi* previous;
  void *allocate, *managed_from_object, *managed_to_object;
  // Returns 0, or sets a Python error. The view owns nothing.
  int (*view_object)(void* object, nb::dlpack::dltensor* out);
  void* current_stream;
};

struct ArrayType {
  Framework framework = Framework::kOther;
  const ExchangeApi* api = nullptr;  // null: none
};

const ExchangeApi* exchange_api(PyTypeObject* type) {
  const nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return api->major_version == 1 ? api : nullptr;
}

ArrayType array_type(nb::handle array) {
  // Types are few and asked again and again; a type that is gone may give its address to another one, so the
  // modules that count are kept alive by being imported.
  static std::map<PyTypeObject*, ArrayType> known;
  PyTypeObject* type = Py_TYPE(array.ptr());
  if (const auto found = known.find(type); found != known.end()) return found->second;
  const std::string root = root_module(type);
  const Framework framework = root == "numpy"                         ? Framework::kNumpy
                              : root == "torch"                       ? Framework::kTorch
                              : root == "mlx"                         ? Framework::kMlx
                              : root == "jax" || root == "jaxlib"     ? Framework::kJax
                              : root == "builtins" || root == "array" ? Framework::kNumpy
                                                                      : Framework::kOther;
  if (framework == Framework::kOther) return {};
  return known.emplace(type, ArrayType{framework, exchange_api(type)}).first->second;
}

// What keeps an array from being one that can be read; empty: that is unknown.
std::string what_is_odd(nb::handle array) {
  const auto text_of = [&](const char* attribute) {
    return nb::cast<std::string>(nb::str(nb::getattr(array, attribute, nb::none())));
  };
  if (root_module(Py_TYPE(array.ptr())) == "torch") {
    if (text_of("is_nested") == "True") return "nested, expected one dense tensor";
    if (text_of("layout") != "torch.strided") return "of layout " + text_of("layout") + ", expected a dense tensor";
    if (text_of("is_quantized") == "True") return "quantized, " + text_of("dtype") + ": dequantize() it first";
    if (text_of("device") != "cpu") return "on device " + text_of("device") + ", this build reads CPU memory";
  }
  if (nb::hasattr(array, "shape") && nb::hasattr(array, "dtype"))
    return "of elements of type " + text_of("dtype") + ", expected numbers";
  return {};
}

nb::ndarray<nb::ro> import_array(nb::handle array, const char* name) {
  nb::ndarray<nb::ro> view;
  if (!array.is_none() && nb::try_cast(nb::borrow(array), view) && view.is_valid()) return view;
  PyErr_Clear();
  const std::string odd = what_is_odd(array);
  raise_type_error(
      std::string(name) + " is a " + type_text(array) + (odd.empty() ? "" : " ") + odd +
      (odd.empty() ? ", expected an array: numpy, torch, mlx or anything else with __dlpack__ or a buffer" : ""));
}

// A device that the CPU cannot read: CUDA, ROCm, ... Host memory that such a device also maps is fine.
void check_device(const char* name, int device_type, int64_t size) {
  if (device_type != nb::device::cpu::value && device_type != nb::device::cuda_host::value &&
      device_type != nb::device::rocm_host::value && size != 0)
    raise_type_error(std::string(name) + " is on device type " + std::to_string(device_type) +
                     " of DLPack, this build reads CPU memory: move it there first");
}

void check_shape(const char* name, const int64_t* shape, size_t ndim, Extents wanted) {
  bool same = ndim == wanted.size();
  for (size_t i = 0; same && i < ndim; ++i) same = wanted.begin()[i] == kAny || wanted.begin()[i] == shape[i];
  if (same) return;
  raise(invalid_argument(std::string(name) + " is " + shape_text({shape, shape + ndim}) + ", expected " +
                         shape_text(std::vector<int64_t>(wanted))));
}

int64_t product(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (const int64_t extent : shape) n *= extent;
  return n;
}

// Halves bit by bit: _Float16 is not a type on every machine. Rounding is to nearest even.
float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, magnitude = uint32_t(half & 0x7fff) << 13;
  if ((half & 0x7c00) == 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | magnitude);  // infinity, NaN
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112F));
}
float bf16_to_float(uint16_t half) { return std::bit_cast<float>(uint32_t(half) << 16); }
uint16_t float_to_half(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
  const auto sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);   // NaN
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds past 65,504
  if (magnitude < 0x38800000)                                   // subnormal: the sum's last bit is worth 2^-24
    return uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000));
  return uint16_t(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}
uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return uint16_t(bits >> 16 | 0x40);  // a NaN stays one
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class Load>
void gather(const int64_t* shape, const int64_t* strides, int ndim, int64_t offset, float*& out, const Load& load) {
  if (ndim == 0) {
    *out++ = load(offset);
    return;
  }
  for (int64_t i = 0; i < shape[0]; ++i)
    gather(shape + 1, strides + 1, ndim - 1, offset + i * strides[0], out, load);
}

void to_floats(const void* data, nb::dlpack::dtype dtype, const int64_t* shape, const int64_t* strides, int ndim,
               float* out) {
  if (dtype == dtype_of(Code::Float, 64)) {
    gather(shape, strides, ndim, 0, out, [&](int64_t i) { return float(static_cast<const double*>(data)[i]); });
  } else if (dtype == dtype_of(Code::Float, 32)) {
    gather(shape, strides, ndim, 0, out, [&](int64_t i) { return static_cast<const float*>(data)[i]; });
  } else if (dtype == dtype_of(Code::Float, 16)) {
    gather(shape, strides, ndim, 0, out,
           [&](int64_t i) { return half_to_float(static_cast<const uint16_t*>(data)[i]); });
  } else {
    gather(shape, strides, ndim, 0, out,
           [&](int64_t i) { return bf16_to_float(static_cast<const uint16_t*>(data)[i]); });
  }
}

void from_floats(const float* data, int64_t n, ElementType type, uint16_t* out) {
  if (type == ElementType::kF16)
    for (int64_t i = 0; i < n; ++i) out[i] = float_to_half(data[i]);
  else
    for (int64_t i = 0; i < n; ++i) out[i] = float_to_bf16(data[i]);
}

nb::object export_array(Framework framework, void* data, const std::vector<int64_t>& shape, nb::handle owner,
                        nb::dlpack::dtype dtype, const int64_t* strides) {
  std::vector<size_t> extents(shape.begin(), shape.end());
  const auto make = [&](auto as) {
    return nb::cast(
        decltype(as)(data, extents.size(), extents.data(), owner, strides, dtype, nb::device::cpu::value),
        nb::rv_policy::reference);
  };
  switch (framework) {
    case Framework::kNumpy:
      return make(nb::ndarray<nb::numpy>());
    case Framework::kTorch:
      return make(nb::ndarray<nb::pytorch>());
    case Framework::kJax:
      return make(nb::ndarray<nb::jax>());
    case Framework::kMlx:
      return make(nb::ndarray<nb::mlx>());
    case Framework::kOther:
      break;
  }
  return make(nb::ndarray<nb::array_api>());
}

}  // namespace

ArrayCounters& process_counters() {
  static ArrayCounters counters;
  return counters;
}

Figures to_dict(const ArrayCounters& counters) {
  nb::dict copied;
  for (const auto& [why, n] : counters.copied) copied[why.c_str()] = n;
  nb::dict out;
  out["zero_copy"] = counters.zero_copy;
  out["copied"] = copied;
  return out;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    out += (i == 0 ? "" : ", ") + (shape[i] == kAny ? std::string("*") : std::to_string(shape[i]));
  return out + "]";
}

InArray::InArray(nb::handle array, const char* name) : name_(name) {
  const ArrayType type = array_type(array);
  framework_ = type.framework;
  if (type.api != nullptr && type.api->view_object(array.ptr(), &view_) == 0) {
    object_ = nb::borrow(array);
  } else {
    PyErr_Clear();
    imported_ = import_array(array, name);
    view_ = {.data = const_cast<void*>(imported_.data()),
             .device = {imported_.device_type(), imported_.device_id()},
             .ndim = int32_t(imported_.ndim()),
             .dtype = imported_.dtype(),
             .shape = const_cast<int64_t*>(imported_.shape_ptr()),
             .strides = const_cast<int64_t*>(imported_.stride_ptr())};
  }
  check_device(name, view_.device.device_type, size());
  if (framework_ != Framework::kTorch) return;
  // A view as of x.conj().imag: the memory has the other sign.
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  static PyObject* const requires_grad = PyUnicode_InternFromString("requires_grad");
  const nb::object negated = nb::steal(PyObject_CallMethodNoArgs(array.ptr(), is_neg));
  if (!negated.is_valid()) throw nb::python_error();
  if (negated.ptr() == Py_True)
    raise(invalid_argument(std::string(name) + " is a lazily negated view: pass " + name + ".resolve_neg()"));
  // Gradients would be lost without a word.
  const nb::object gradients = nb::steal(PyObject_GetAttr(array.ptr(), requires_grad));
  if (!gradients.is_valid()) throw nb::python_error();
  if (gradients.ptr() == Py_True && nb::cast<bool>(nb::module_::import_("torch").attr("is_grad_enabled")())) {
    PyErr_SetString(PyExc_RuntimeError,
                    (std::string(name) + " requires gradients, and pagedkv has no backward: detach "
                                         "it, or compute under torch.no_grad()")
                        .c_str());
    throw nb::python_error();
  }
}

InArray::InArray(nb::handle array, const char* name, Extents extents) : InArray(array, name) {
  check_shape(name, view_.shape, size_t(view_.ndim), extents);
}

int64_t InArray::size() const {
  int64_t n = 1;
  for (int axis = 0; axis < ndim(); ++axis) n *= extent(axis);
  return n;
}

std::string InArray::dtype_name() const { return dtype_text(dtype()); }

ElementType InArray::element_type() const {
  if (is(Code::Float, 32)) return ElementType::kF32;
  if (is(Code::Float, 16)) return ElementType::kF16;
  if (is(Code::Bfloat, 16)) return ElementType::kBF16;
  raise_type_error(std::string(name_) + " has elements of type " + dtype_name() +
                   ", allowed are float32, float16, bfloat16 (and float64, which is converted)");
}

bool InArray::contiguous() const {
  int64_t expected = 1;
  for (int axis = ndim(); axis-- > 0;) {
    if (extent(axis) != 1 && stride(axis) != expected) return false;
    expected *= extent(axis);
  }
  return true;
}

TokenRows token_rows(const InArray& array, int64_t n_tokens, int64_t num_heads, int64_t head_dim) {
  const int ndim = array.ndim();
  int64_t found[4] = {};
  for (int axis = 0; axis < ndim && axis < 4; ++axis) found[axis] = array.extent(axis);
  const auto fits = [](int64_t wanted, int64_t extent) { return wanted == kAny || wanted == extent; };
  if (ndim == 3 && fits(n_tokens, found[0]) && fits(num_heads, found[1]) && fits(head_dim, found[2]))
    return {.n_tokens = found[0],
            .num_heads = found[1],
            .head_dim = found[2],
            .token_stride = array.stride(0),
            .head_stride = array.stride(1),
            .dim_stride = array.stride(2)};
  if (ndim == 4 && fits(n_tokens, found[0] * found[2]) && fits(num_heads, found[1]) && fits(head_dim, found[3]))
    return {.n_tokens = found[0] * found[2],
            .num_heads = found[1],
            .head_dim = found[3],
            .token_stride = array.stride(found[2] == 1 ? 0 : 2),
            .head_stride = array.stride(1),
            .dim_stride = array.stride(3),
            .uniform = found[0] == 1 || found[2] == 1 || array.stride(0) == found[2] * array.stride(2),
            .batch = found[0]};
  const std::string tokens = n_tokens == kAny ? "n_tokens" : std::to_string(n_tokens);
  std::vector<int64_t> all;
  for (int axis = 0; axis < ndim; ++axis) all.push_back(array.extent(axis));
  raise(invalid_argument(std::string(array.name()) + " is " + shape_text(all) + ", expected " +
                         shape_text({n_tokens, num_heads, head_dim}) + " or, for a batch, [batch, " +
                         (num_heads == kAny ? "*" : std::to_string(num_heads)) + ", n, " +
                         (head_dim == kAny ? "*" : std::to_string(head_dim)) + "] with batch * n = " + tokens));
}

void copy_rows(const InArray& array, float* out) {
  if (array.ndim() == 3) {
    const int64_t shape[3] = {array.extent(0), array.extent(1), array.extent(2)};
    const int64_t strides[3] = {array.stride(0), array.stride(1), array.stride(2)};
    to_floats(array.data(), array.dtype(), shape, strides, 3, out);
    return;
  }
  const int64_t shape[4] = {array.extent(0), array.extent(2), array.extent(1), array.extent(3)};
  const int64_t strides[4] = {array.stride(0), array.stride(2), array.stride(1), array.stride(3)};
  to_floats(array.data(), array.dtype(), shape, strides, 4, out);
}

namespace {

// Why rows cannot be read where they lie; null: they can.
const char* why_copied(const InArray& array, const TokenRows& rows) {
  if (array.is_double()) return "float64";
  if (!rows.uniform) return "several tokens of several sequences";
  if (rows.dim_stride != 1 && rows.head_dim > 1) return "last dimension not contiguous";
  // The library takes a stride of 0 for a dense one.
  if ((rows.token_stride == 0 && rows.n_tokens > 1) || (rows.head_stride == 0 && rows.num_heads > 1))
    return "broadcast";
  return nullptr;
}

}  // namespace

RowsIn::RowsIn(nb::handle array, const char* name, int64_t n_tokens, int64_t num_heads, int64_t head_dim,
               ArrayCounters& counters)
    : array_(array, name), shape_(token_rows(array_, n_tokens, num_heads, head_dim)) {
  if (!array_.is_double()) rows_.type = array_.element_type();
  if (const char* why = why_copied(array_, shape_)) {
    ++counters.copied[why];
    copy_.resize(size_t(array_.size()));
    copy_rows(array_, copy_.data());
    rows_ = {.data = copy_.data(), .type = ElementType::kF32};
    return;
  }
  ++counters.zero_copy;
  rows_.data = array_.data();
  rows_.token_stride = shape_.n_tokens > 1 ? shape_.token_stride : 0;
  rows_.head_stride = shape_.num_heads > 1 ? shape_.head_stride : 0;
}

QueriesIn::QueriesIn(nb::handle array, int64_t n_tokens, int64_t num_heads, int64_t head_dim,
                     ArrayCounters& counters)
    : array_(array, "q"), shape_(token_rows(array_, n_tokens, num_heads, head_dim)) {
  const bool single = array_.is(Code::Float, 32);
  if (!single && !array_.is_double()) array_.element_type();
  const char* why = why_copied(array_, shape_);
  const bool dense_heads = shape_.num_heads == 1 || shape_.head_stride == shape_.head_dim;
  if (single && why == nullptr && dense_heads && (shape_.n_tokens == 1 || shape_.token_stride > 0)) {
    ++counters.zero_copy;
    data_ = static_cast<const float*>(array_.data());
    token_stride_ = shape_.n_tokens > 1 ? shape_.token_stride : 0;
    return;
  }
  ++counters.copied[!single ? array_.dtype_name() : why != nullptr ? why : "query heads not contiguous"];
  copy_.reset(new float[size_t(array_.size() + 1)]);
  copy_rows(array_, copy_.get());
  data_ = copy_.get();
}

FloatsIn::FloatsIn(nb::handle array, const char* name, Extents extents, ArrayCounters& counters)
    : array_(array, name, extents) {
  const bool single = array_.is(Code::Float, 32);
  if (single && array_.contiguous()) {
    ++counters.zero_copy;
    data_ = static_cast<const float*>(array_.data());
    return;
  }
  if (!array_.is_double()) array_.element_type();
  ++counters.copied[single ? "not contiguous" : array_.dtype_name()];
  int64_t shape[8] = {}, strides[8] = {};
  const int ndim = int(extents.size());
  for (int i = 0; i < ndim; ++i) {
    shape[i] = array_.extent(i);
    strides[i] = array_.stride(i);
  }
  copy_.resize(size_t(array_.size()));
  to_floats(array_.data(), array_.dtype(), shape, strides, ndim, copy_.data());
  data_ = copy_.data();
}

template <class Int>
IntsIn<Int>::IntsIn(nb::handle array, const char* name, Extents extents) {
  const auto fits = [&](int64_t value) {
    if (value < std::numeric_limits<Int>::min() || value > std::numeric_limits<Int>::max())
      raise(invalid_argument(std::string(name) + " has " + std::to_string(value) + ", beyond " +
                             std::to_string(8 * sizeof(Int)) + "-bit integers"));
    return Int(value);
  };
  if (nb::isinstance<nb::list>(array) || nb::isinstance<nb::tuple>(array) || PyRange_Check(array.ptr())) {
    if (extents.size() != 1) raise_type_error(std::string(name) + " is a list, expected an integer array");
    for (const nb::handle item : nb::borrow(array)) {
      int64_t value = 0;
      if (!nb::try_cast(nb::borrow(item), value))
        raise_type_error(std::string(name) + " has a " + type_text(item) + ", expected integers");
      copy_.push_back(fits(value));
    }
    size_ = int64_t(copy_.size());
    extents_ = {size_};
    check_shape(name, extents_.data(), 1, extents);
    data_ = copy_.data();
    return;
  }
  keep_ = nb::borrow(array);
  array_ = std::make_unique<InArray>(array, name, extents);
  size_ = array_->size();
  for (size_t i = 0; i < extents.size(); ++i) extents_.push_back(array_->extent(int(i)));
  if (array_->is(Code::Int, 8 * sizeof(Int)) && array_->contiguous()) {
    data_ = static_cast<const Int*>(array_->data());
    return;
  }
  copy_.reserve(size_t(size_));
  const int64_t rows = extents_.size() == 2 ? extents_[0] : 1, columns = extents_.back();
  const int64_t row_stride = extents_.size() == 2 ? array_->stride(0) : 0;
  const int64_t column_stride = array_->stride(int(extents_.size()) - 1);
  const auto taken_as = [&]<class Element>(Element, Code code) {
    if (!array_->is(code, 8 * sizeof(Element))) return false;
    const auto* values = static_cast<const Element*>(array_->data());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c)
        copy_.push_back(fits(int64_t(values[r * row_stride + c * column_stride])));
    return true;
  };
  if (!(taken_as(int32_t(), Code::Int) || taken_as(int64_t(), Code::Int) || taken_as(int16_t(), Code::Int) ||
        taken_as(uint8_t(), Code::UInt) || taken_as(uint16_t(), Code::UInt) || taken_as(uint32_t(), Code::UInt)))
    raise_type_error(std::string(name) + " has elements of type " + array_->dtype_name() +
                     ", expected int32 or int64");
  data_ = copy_.data();
}
template class IntsIn<int32_t>;
template class IntsIn<int64_t>;

FloatsOut::FloatsOut(std::vector<int64_t> shape, const InArray& like, nb::handle out, const char* out_name,
                     ArrayCounters& counters)
    : shape_(std::move(shape)),
      framework_(like.framework()),
      type_(like.is_double() ? ElementType::kF32 : like.element_type()),
      n_(product(shape_)) {
  if (!out.is_none()) {
    if (!nb::try_cast(nb::borrow(out), out_view_) || !out_view_.is_valid())
      raise_type_error(std::string(out_name) + " is a " + type_text(out) + ", expected a writable array");
    const std::vector<int64_t> found(out_view_.shape_ptr(), out_view_.shape_ptr() + out_view_.ndim());
    if (found != shape_)
      raise(invalid_argument(std::string(out_name) + " is " + shape_text(found) + ", expected " +
                             shape_text(shape_)));
    int64_t expected = 1;
    for (size_t axis = shape_.size(); axis-- > 0; expected *= shape_[axis])
      if (shape_[axis] != 1 && out_view_.stride(axis) != expected)
        raise(invalid_argument(std::string(out_name) + " is not contiguous"));
    const nb::dlpack::dtype dtype = out_view_.dtype();
    if (dtype == dtype_of(Code::Float, 32))
      type_ = ElementType::kF32;
    else if (dtype == dtype_of(Code::Float, 16))
      type_ = ElementType::kF16;
    else if (dtype == dtype_of(Code::Bfloat, 16))
      type_ = ElementType::kBF16;
    else
      raise_type_error(std::string(out_name) + " has elements of type " + dtype_text(dtype) +
                       ", allowed are float32, float16, bfloat16");
    out_ = nb::borrow(out);
    if (type_ == ElementType::kF32) {
      ++counters.zero_copy;
      data_ = static_cast<float*>(out_view_.data());
      return;
    }
  }
  if (type_ != ElementType::kF32) ++counters.copied[type_ == ElementType::kF16 ? "float16" : "bfloat16"];
  owned_.reset(new float[size_t(n_ + 1)]);
  data_ = owned_.get();
}

FloatsOut::FloatsOut(const TokenRows& rows, int64_t head_dim, const InArray& like, nb::handle out,
                     const char* out_name, ArrayCounters& counters)
    : FloatsOut({rows.n_tokens, rows.num_heads, head_dim}, like, out, out_name, counters) {
  if (rows.batch == 0 || out_.is_valid()) return;
  const int64_t n = rows.batch > 0 ? rows.n_tokens / rows.batch : 0;
  shape_ = {rows.batch, rows.num_heads, n, head_dim};
  strides_ = {n * rows.num_heads * head_dim, head_dim, rows.num_heads * head_dim, 1};
}

nb::object FloatsOut::finish() {
  if (type_ == ElementType::kF32)
    return out_.is_valid() ? out_ : float_array(framework_, std::move(owned_), shape_, strides_);
  if (out_.is_valid()) {
    from_floats(data_, n_, type_, static_cast<uint16_t*>(out_view_.data()));
    return out_;
  }
  std::vector<std::byte> halves(size_t(2 * n_));
  from_floats(data_, n_, type_, reinterpret_cast<uint16_t*>(halves.data()));
  return byte_array(framework_, std::move(halves), shape_,
                    dtype_of(type_ == ElementType::kF16 ? Code::Float : Code::Bfloat, 16), strides_);
}

nb::object block_tensor(const TensorView& view, Format format, bool scales, nb::handle owner) {
  nb::dlpack::dtype dtype = dtype_of(Code::Float, 32);
  if (!scales && format == Format::kF16) dtype = dtype_of(Code::Float, 16);
  if (!scales && format == Format::kBF16) dtype = dtype_of(Code::Bfloat, 16);
  if (!scales && is_quantized(format)) dtype = dtype_of(format == Format::kQ8 ? Code::Int : Code::UInt, 8);
  int64_t strides[4];
  for (int axis = 0; axis < 4; ++axis) strides[axis] = view.strides[axis] / view.element_bytes;
  return export_array(Framework::kOther, view.data, {view.shape, view.shape + 4}, owner, dtype, strides);
}

BlockTensorIn block_tensor_in(nb::handle array, const char* name, bool writable) {
  BlockTensorIn in;
  if (writable) {
    if (!nb::try_cast(nb::borrow(array), in.writable) || !in.writable.is_valid()) {
      InArray readable(array, name, {kAny, kAny, kAny, kAny});  // says what is wrong, if it is no array at all
      raise_type_error(std::string(name) + " is read-only");
    }
  }
  in.readable = import_array(array, name);
  check_device(name, in.readable.device_type(), int64_t(in.readable.size()));
  check_shape(name, in.readable.shape_ptr(), in.readable.ndim(), {kAny, kAny, kAny, kAny});
  in.dtype = in.readable.dtype();
  in.view.data = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(in.readable.data())));
  in.view.element_bytes = int64_t(in.readable.itemsize());
  for (int axis = 0; axis < 4; ++axis) {
    in.view.shape[axis] = int64_t(in.readable.shape(size_t(axis)));
    in.view.strides[axis] = in.readable.stride(size_t(axis)) * in.view.element_bytes;
  }
  return in;
}

nb::object float_array(Framework framework, std::unique_ptr<float[]> data, const std::vector<int64_t>& shape,
                       const std::vector<int64_t>& strides) {
  float* values = data.get();
  const nb::capsule owner(data.release(), [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return export_array(framework, values, shape, owner, dtype_of(Code::Float, 32),
                      strides.empty() ? nullptr : strides.data());
}

nb::object byte_array(Framework framework, std::vector<std::byte> data, const std::vector<int64_t>& shape,
                      nb::dlpack::dtype dtype, const std::vector<int64_t>& strides) {
  auto* kept = new std::vector<std::byte>(std::move(data));
  const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  return export_array(framework, kept->data(), shape, owner, dtype, strides.empty() ? nullptr : strides.data());
}

}  // namespace pagedkv::python
