// Who may ask: hosts by whose name the server is called, the pages that browsers show, keys.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/api_error.h"
#include "server/http.h"

namespace pagedkv::server {

struct AccessRules {
  std::string host = "127.0.0.1";          // what the server listens on
  std::vector<std::string> allowed_hosts;  // further names by which it may be called; "*": any
  std::vector<std::string> api_keys;       // none: no key is asked for
  std::string cors_origin;                 // pages of this origin may call; "*": any; empty: only our own
};

// Const members: any thread.
class Access {
 public:
  explicit Access(AccessRules rules);

  // 403 where the client calls the server by a name that is not its own. A page of somebody else whose name was
  // made to lead here (DNS rebinding) would be a page of the server's own otherwise.
  std::optional<ApiError> check_host(const HttpRequest& request) const;
  // What a browser asks before a page of another origin may call; none where it did not ask.
  std::optional<HttpReply> preflight(const HttpRequest& request) const;
  std::optional<ApiError> check_page(const HttpRequest& request) const;  // 403
  std::optional<ApiError> check_key(const HttpRequest& request) const;   // 401
  void allow_origin(HttpReply& reply) const;  // the headers that let pages of cors_origin read it

 private:
  const AccessRules rules_;
  const bool any_address_;  // it listens on all addresses of the machine
};

}  // namespace pagedkv::server
