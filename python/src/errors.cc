#include "errors.h"

#include <mutex>
#include <string_view>
#include <vector>

#include "pagedkv/log.h"

namespace pagedkv::python {
namespace {

std::mutex notices_mutex;
std::vector<std::string> notices;

}  // namespace

void take_notices() {
  set_log_sink([](std::string_view message) {
    const std::scoped_lock lock(notices_mutex);
    notices.emplace_back(message);
  });
}

void raise(const Status& status) {
  const auto ours = [](const char* name) { return nb::module_::import_("pagedkv.errors").attr(name); };
  nb::object type = nb::borrow(PyExc_RuntimeError);
  switch (status.code()) {
    case Code::kOk:
    case Code::kInternal:
      break;
    case Code::kInvalidArgument:
      type = nb::borrow(PyExc_ValueError);
      break;
    case Code::kNotFound:
      type = nb::borrow(PyExc_FileNotFoundError);
      break;
    case Code::kCapacity:
      type = ours("CapacityError");
      break;
    case Code::kNotFinite:
      type = ours("NotFiniteError");
      break;
    case Code::kStale:
      type = ours("StaleError");
      break;
    case Code::kUnsupported:
      type = ours("UnsupportedError");
      break;
    case Code::kCorrupt:
      type = ours("CorruptError");
      break;
    case Code::kNoMemory:
      type = ours("NoMemoryError");
      break;
    case Code::kUnavailable:
      type = ours("UnavailableError");
      break;
  }
  PyErr_SetString(type.ptr(), status.message().c_str());
  throw nb::python_error();
}

void raise_type_error(const std::string& message) {
  PyErr_SetString(PyExc_TypeError, message.c_str());
  throw nb::python_error();
}

void warn_of_notices() {
  std::vector<std::string> taken;
  {
    const std::scoped_lock lock(notices_mutex);
    taken.swap(notices);
  }
  for (const std::string& message : taken)
    if (PyErr_WarnEx(PyExc_RuntimeWarning, message.c_str(), 2) != 0) throw nb::python_error();
}

}  // namespace pagedkv::python
