// Reads a JSON object field by field and notes what is wrong with it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "server/api_error.h"
#include "server/json_body.h"

namespace pagedkv::server {

// A value as it is shown in an error: short, whatever it is.
std::string shown(const Json& value);

// Remembers which fields it was asked for; null counts as not given. The first that is wrong goes to `error`, as
// long as that is empty, and reads as if it were not given: a caller looks at `error` once, before it does anything
// that costs. One thread.
class Fields {
 public:
  // Both must outlive it. prefix: of the fields' names in errors, "stream_options".
  Fields(const Json& object, std::optional<ApiError>& error, std::string prefix = "")
      : object_(object), error_(error), prefix_(std::move(prefix)) {}

  const Json* find(const std::string& name);
  std::string path(const std::string& name) const { return prefix_.empty() ? name : prefix_ + "." + name; }
  void refuse(const std::string& param, const std::string& message);
  void wrong(const std::string& name, const Json& value, const std::string& expected);

  bool boolean(const std::string& name, bool otherwise);
  std::string string(const std::string& name, const std::string& otherwise, size_t most);
  // Whole numbers of any size; those past int64 are as large as it gets.
  std::optional<int64_t> whole(const std::string& name, int64_t low, int64_t high);
  void number(const std::string& name, double low, double high, float& target);
  // Refuses a field whose being obeyed the client counts on.
  void unsupported(const std::string& name, const std::string& why,
                   const std::function<bool(const Json&)>& harmless);
  std::vector<std::string> rest() const;  // names that nobody asked for

 private:
  const Json& object_;
  std::optional<ApiError>& error_;
  const std::string prefix_;
  std::set<std::string> seen_;
};

}  // namespace pagedkv::server
