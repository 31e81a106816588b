// Who may ask: keys, and the pages that browsers show.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/api_error.h"
#include "server/http.h"

namespace pagedkv::server {

// Const members: any thread.
class Access {
 public:
  // api_keys: none, and no key is asked for. cors_origin: pages of this origin may call; "*": any; empty: only our
  // own.
  Access(std::vector<std::string> api_keys, std::string cors_origin)
      : api_keys_(std::move(api_keys)), cors_origin_(std::move(cors_origin)) {}

  // What a browser asks before a page of another origin may call; none where it did not ask.
  std::optional<HttpReply> preflight(const HttpRequest& request) const;
  std::optional<ApiError> check_page(const HttpRequest& request) const;  // 403
  std::optional<ApiError> check_key(const HttpRequest& request) const;   // 401
  void allow_origin(HttpReply& reply) const;  // the header that lets pages of cors_origin read it

 private:
  const std::vector<std::string> api_keys_;
  const std::string cors_origin_;
};

}  // namespace pagedkv::server
