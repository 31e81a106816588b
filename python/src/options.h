// Arguments by name, bound once: a table names the fields of a struct, and each value is read into its field by the
// field's type. What does not fit is told with the argument's name, its value and what is allowed.
#pragma once

#include <nanobind/nanobind.h>

#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "pagedkv/attention.h"
#include "pagedkv/format.h"
#include "pagedkv/layout.h"
#include "pagedkv/units.h"

namespace pagedkv::python {

struct Argument {
  const char* name;
  nb::handle value;
};

// "64.0, a float", cut where it is long.
std::string shown(nb::handle value);
// TypeError: `name` is `value`, allowed are `allowed`.
[[noreturn]] void refuse_type(const Argument& argument, const char* allowed);

// Integers are what can be an index: Python's, numpy's, a tensor of one. No bool, no float.
// Errors: TypeError; ValueError beyond `least` to `most`.
int64_t whole(const Argument& argument, int64_t least = std::numeric_limits<int64_t>::min(),
              int64_t most = std::numeric_limits<int64_t>::max());
double number(const Argument& argument);

void read(const Argument& argument, uint64_t& into);
void read(const Argument& argument, bool& into);  // Python's and numpy's
void read(const Argument& argument, std::string& into);
void read(const Argument& argument, KvQuantConfig& into);  // a mode, or a PagedKVQuantConfig
void read(const Argument& argument, ArenaOrder& into);
void read(const Argument& argument, QueryPath& into);
inline void read(const Argument& argument, nb::object& into) { into = nb::borrow(argument.value); }
template <std::signed_integral Int>
void read(const Argument& argument, Int& into) {
  into = Int(whole(argument, std::numeric_limits<Int>::min(), std::numeric_limits<Int>::max()));
}
template <std::floating_point Float>
void read(const Argument& argument, Float& into) {
  into = Float(number(argument));
}
template <class Kind>
void read(const Argument& argument, Count<Kind>& into) {
  into = Count<Kind>(whole(argument));
}
template <class T>
void read(const Argument& argument, std::optional<T>& into) {
  if (argument.value.is_none())
    into.reset();
  else
    read(argument, into.emplace());
}
template <class T>
void read(const Argument& argument, std::vector<T>& into) {
  if (PyUnicode_Check(argument.value.ptr()) || !PySequence_Check(argument.value.ptr()))
    refuse_type(argument, "lists");
  into.clear();
  for (const nb::handle item : nb::borrow(argument.value)) read({argument.name, item}, into.emplace_back());
}

// A dict.
template <class Key, class Value>
void read(const Argument& argument, std::vector<std::pair<Key, Value>>& into) {
  if (argument.value.is_none()) return;
  if (!PyDict_Check(argument.value.ptr())) refuse_type(argument, "dicts");
  for (const auto& [key, value] : nb::borrow<nb::dict>(argument.value)) {
    auto& pair = into.emplace_back();
    read({argument.name, key}, pair.first);
    read({argument.name, value}, pair.second);
  }
}

// A parameter that a binding shows as a T and takes as anything, to tell by name what does not fit.
template <class T>
struct Given {
  nb::handle value;
  T read_as(const char* name) const {
    T out{};
    read(Argument{name, value}, out);
    return out;
  }
};

template <class Options>
struct Field {
  const char* name;
  void (*read)(Options&, const Argument&);
};
// Field{"name", &field<&Options::part, &Part::field>}
template <auto... path, class Options>
void field(Options& options, const Argument& argument) {
  read(argument, (options.*....*path));
}

// TypeError: no such argument; `names` are those that there are.
[[noreturn]] void refuse_name(const char* function, nb::handle name, const std::string& names);

template <class Options, size_t n>
void read_options(const char* function, const nb::kwargs& given, const Field<Options> (&fields)[n], Options& into) {
  for (const auto& [key, value] : given) {
    size_t at = 0;
    while (at < n && PyUnicode_CompareWithASCIIString(key.ptr(), fields[at].name) != 0) ++at;
    if (at == n) {
      std::string names;
      for (const Field<Options>& known : fields) names += (names.empty() ? "" : ", ") + std::string(known.name);
      refuse_name(function, key, names);
    }
    fields[at].read(into, {fields[at].name, value});
  }
}

}  // namespace pagedkv::python

namespace nanobind::detail {

template <class T>
struct type_caster<pagedkv::python::Given<T>> {
  NB_TYPE_CASTER(pagedkv::python::Given<T>, make_caster<T>::Name)
  bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
    value.value = source;
    return true;
  }
};

}  // namespace nanobind::detail
