#include "options.h"

#include <nanobind/stl/string.h>

#include <cstring>

#include "pagedkv/paged_kv_cache.h"

namespace pagedkv::python {
namespace {

bool is_numpy_bool(nb::handle value) {
  const char* type = Py_TYPE(value.ptr())->tp_name;
  return std::strcmp(type, "numpy.bool") == 0 || std::strcmp(type, "numpy.bool_") == 0;
}

// Any object as Python's int; null: it is none.
nb::object index_of(nb::handle value) {
  if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) return {};
  PyObject* index = PyNumber_Index(value.ptr());
  if (index == nullptr) PyErr_Clear();
  return nb::steal(index);
}

[[noreturn]] void refuse_value(const Argument& argument, const std::string& allowed) {
  raise(invalid_argument(std::string(argument.name) + " is " + nb::cast<std::string>(nb::str(argument.value)) +
                         ", allowed are " + allowed));
}

}  // namespace

std::string shown(nb::handle value) {
  constexpr size_t kLongest = 60;
  std::string text = nb::cast<std::string>(nb::repr(value));
  if (text.size() > kLongest) {
    size_t end = kLongest;
    while (end > 0 && (text[end] & 0xc0) == 0x80) --end;  // between two characters of UTF-8
    text = text.substr(0, end) + "...";
  }
  return text + (value.is_none() ? "" : ", of type " + nb::cast<std::string>(value.type().attr("__qualname__")));
}

void refuse_type(const Argument& argument, const char* allowed) {
  raise_type_error(std::string(argument.name) + " is " + shown(argument.value) + ", allowed are " + allowed);
}

int64_t whole(const Argument& argument, int64_t least, int64_t most) {
  nb::object index;
  nb::handle number = argument.value;
  if (!PyLong_CheckExact(number.ptr())) {
    index = index_of(number);
    if (!index.is_valid()) refuse_type(argument, "integers");
    number = index;
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0 || value < least || value > most)
    refuse_value(argument, std::to_string(least) + " to " + std::to_string(most));
  return value;
}

double number(const Argument& argument) {
  PyObject* const value = argument.value.ptr();
  if (PyFloat_CheckExact(value)) return PyFloat_AS_DOUBLE(value);
  if (PyBool_Check(value) || is_numpy_bool(argument.value) || !PyNumber_Check(value))
    refuse_type(argument, "numbers");
  const double read = PyFloat_AsDouble(value);
  if (read == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse_type(argument, "numbers");
  }
  return read;
}

void read(const Argument& argument, uint64_t& into) {
  const nb::object index = index_of(argument.value);
  if (!index.is_valid()) refuse_type(argument, "integers");
  into = PyLong_AsUnsignedLongLong(index.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse_value(argument, "0 to 18446744073709551615");
  }
}

void read(const Argument& argument, bool& into) {
  if (!PyBool_Check(argument.value.ptr()) && !is_numpy_bool(argument.value))
    refuse_type(argument, "True and False");
  into = PyObject_IsTrue(argument.value.ptr()) == 1;
}

void read(const Argument& argument, std::string& into) {
  if (!PyUnicode_Check(argument.value.ptr())) refuse_type(argument, "strings");
  into = nb::cast<std::string>(argument.value);
}

void read(const Argument& argument, KvQuantConfig& into) {
  const nb::object mode = nb::getattr(argument.value, "mode", argument.value);
  if (!PyUnicode_Check(mode.ptr())) refuse_type(argument, "modes such as 'q8', and a PagedKVQuantConfig");
  into = check(parse_kv_quant(nb::cast<std::string>(mode)));
}

void read(const Argument& argument, ArenaOrder& into) {
  std::string word;
  read(argument, word);
  for (const ArenaOrder order : {ArenaOrder::kBlockMajor, ArenaOrder::kLayerMajor})
    if (word == arena_order_name(order)) {
      into = order;
      return;
    }
  raise(invalid_argument("arena is \"" + word + "\", allowed are block_major, layer_major"));
}

void read(const Argument& argument, QueryPath& into) {
  std::string word;
  read(argument, word);
  into = check(parse_query_path(word));
}

void refuse_name(const char* function, nb::handle name, const std::string& names) {
  raise_type_error(std::string(function) + " got an unexpected keyword argument '" +
                   nb::cast<std::string>(nb::str(name)) + "'; there are " + names);
}

}  // namespace pagedkv::python
