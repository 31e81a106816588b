// What is told of requests: a line each, the last ones, and how many replies there were.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "server/json_body.h"

namespace pagedkv::server {

int64_t unix_seconds();

// The reason of an error without what it quotes: that may be somebody's text.
std::string without_texts(const std::string& reason);

// Any thread.
class RequestLog {
 public:
  using Write = std::function<void(const std::string& line)>;
  // write: may be empty. as_json: one JSON object a line instead of key=value.
  RequestLog(Write write, bool as_json) : write_(std::move(write)), as_json_(as_json) {}

  void line(const OrderedJson& fields) const;
  void remember(OrderedJson request);  // a completion that ended
  OrderedJson recent() const;          // the last of them, newest first

  void count_reply(const std::string& path, int status);
  std::map<std::pair<std::string, int>, int64_t> replies() const;  // (path, status) -> count

 private:
  const Write write_;
  const bool as_json_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, int64_t> replies_;
  std::deque<OrderedJson> recent_;
};

}  // namespace pagedkv::server
