#include "server/json_body.h"

#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pagedkv::server {
namespace {

constexpr int kLookEvery = 4096;  // values between two looks whether the client left
constexpr size_t kShownError = 300;

// Builds a value while it is read. The library's own builders look each finished value's siblings, or each name's
// neighbours, through: a body of a hundred thousand of them took a minute.
template <typename J>
class Builder {
 public:
  explicit Builder(const Gone& gone) : gone_(gone) {}
  ApiResult<J> take() {
    if (error_) return *std::move(error_);
    return std::move(root_);
  }

  // What the reader calls. False: it is to stop.
  bool null() { return add(nullptr); }
  bool boolean(bool value) { return add(value); }
  bool number_integer(int64_t value) { return add(value); }
  bool number_unsigned(uint64_t value) { return add(value); }
  bool number_float(double value, const std::string&) { return add(value); }
  bool string(std::string& value) { return add(std::move(value)); }
  bool binary(std::vector<uint8_t>&) { return false; }  // JSON text has none
  bool start_object(size_t) { return open(J::object()); }
  bool start_array(size_t) { return open(J::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool key(std::string& name) {
    auto& members = open_.back()->template get_ref<typename J::object_t&>();
    if constexpr (std::is_same_v<J, Json>) {
      member_ = &members[name];
    } else {
      const auto [at, is_new] = names_.back().try_emplace(name, members.size());
      if (is_new) members.emplace_back(name, nullptr);
      member_ = &(members.begin() + std::ptrdiff_t(at->second))->second;
    }
    return true;
  }
  bool parse_error(size_t, const std::string&, const std::exception& error) {
    return stop({.message = "the body is not JSON: " + shortened(error.what(), kShownError)});
  }

 private:
  bool stop(ApiError error) {
    error_ = std::move(error);
    return false;
  }
  bool add(J value) {
    if (++n_values_ % kLookEvery == 0 && gone_ && gone_()) return stop(client_left());
    *place() = std::move(value);
    return true;
  }
  bool open(J empty) {
    if (open_.size() >= kMaxJsonDepth)
      return stop({.message = "the body is nested deeper than " + std::to_string(kMaxJsonDepth) + " levels"});
    J* at = place();
    *at = std::move(empty);
    open_.push_back(at);  // stays where it is: its parents do not grow while it is open
    names_.emplace_back();
    return true;
  }
  bool close() {
    open_.pop_back();
    names_.pop_back();
    return true;
  }
  // Where the next value goes.
  J* place() {
    if (open_.empty()) return &root_;
    if (open_.back()->is_object()) return member_;
    return &open_.back()->template get_ref<typename J::array_t&>().emplace_back();
  }

  const Gone& gone_;
  J root_;
  std::vector<J*> open_;
  std::vector<std::unordered_map<std::string, size_t>> names_;  // of each open object: name -> member
  J* member_ = nullptr;
  int64_t n_values_ = 0;
  std::optional<ApiError> error_;
};

template <typename J>
ApiResult<J> parse(std::string_view body, const Gone& gone) {
  if (body.empty()) return ApiError{.message = "the body is empty, a JSON object is expected"};
  Builder<J> builder(gone);
  Json::sax_parse(body, &builder);
  auto json = builder.take();
  if (json.ok() && !json->is_object())
    return ApiError{.message = std::string("the body is a JSON ") + json->type_name() + ", an object is expected"};
  return json;
}

}  // namespace

ApiError client_left() { return {.status = 499, .message = "the client left"}; }

ApiResult<Json> parse_object(std::string_view body, const Gone& gone) { return parse<Json>(body, gone); }

ApiResult<OrderedJson> parse_ordered_object(std::string_view body, const Gone& gone) {
  return parse<OrderedJson>(body, gone);
}

std::string dump(const OrderedJson& json) {
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace pagedkv::server
