#include "server/fields.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace pagedkv::server {

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > 80) text = text.substr(0, 77) + "...";
  return text;
}

const Json* Fields::find(const std::string& name) {
  seen_.insert(name);
  const auto at = object_.find(name);
  return at == object_.end() || at->is_null() ? nullptr : &*at;
}

void Fields::refuse(const std::string& param, const std::string& message) {
  if (!error_) error_ = ApiError{.message = message, .param = param};
}

void Fields::wrong(const std::string& name, const Json& value, const std::string& expected) {
  refuse(path(name), path(name) + " is " + shown(value) + ", expected is " + expected);
}

bool Fields::boolean(const std::string& name, bool otherwise) {
  const Json* value = find(name);
  if (!value) return otherwise;
  if (value->is_boolean()) return value->get<bool>();
  wrong(name, *value, "true or false");
  return otherwise;
}

std::string Fields::string(const std::string& name, const std::string& otherwise, size_t most) {
  const Json* value = find(name);
  if (!value) return otherwise;
  if (!value->is_string()) {
    wrong(name, *value, "a string");
  } else if (value->get_ref<const std::string&>().size() > most) {
    wrong(name, *value, "a string of at most " + std::to_string(most) + " bytes");
  } else {
    return value->get<std::string>();
  }
  return otherwise;
}

std::optional<int64_t> Fields::whole(const std::string& name, int64_t low, int64_t high) {
  const Json* value = find(name);
  if (!value) return std::nullopt;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::optional<int64_t> n;
  if (value->is_number_unsigned()) {
    n = int64_t(std::min<uint64_t>(value->get<uint64_t>(), kMost));
  } else if (value->is_number_integer()) {
    n = value->get<int64_t>();
  } else if (value->is_number_float() && std::floor(value->get<double>()) == value->get<double>()) {
    n = value->get<double>() >= 9.2e18    ? kMost
        : value->get<double>() <= -9.2e18 ? std::numeric_limits<int64_t>::min()
                                          : int64_t(value->get<double>());
  }
  if (n && *n >= low && *n <= high) return n;
  wrong(name, *value,
        "a whole number" + (high == kMost ? " of at least " + std::to_string(low)
                                          : " from " + std::to_string(low) + " to " + std::to_string(high)));
  return std::nullopt;
}

void Fields::number(const std::string& name, double low, double high, float& target) {
  const Json* value = find(name);
  if (!value) return;
  if (value->is_number() && value->get<double>() >= low && value->get<double>() <= high) {
    target = value->get<float>();
  } else {
    wrong(name, *value, "a number from " + Json(low).dump() + " to " + Json(high).dump());
  }
}

void Fields::unsupported(const std::string& name, const std::string& why,
                         const std::function<bool(const Json&)>& harmless) {
  const Json* value = find(name);
  if (value && !harmless(*value)) refuse(path(name), path(name) + ": " + why);
}

std::vector<std::string> Fields::rest() const {
  std::vector<std::string> names;
  for (const auto& [name, value] : object_.items())
    if (!seen_.contains(name)) names.push_back(path(name));
  return names;
}

}  // namespace pagedkv::server
