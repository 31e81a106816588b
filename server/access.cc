#include "server/access.h"

#include <string_view>

namespace pagedkv::server {
namespace {

// Equal or not, in a time that tells nothing but the length of what the client sent.
bool equal_in_constant_time(std::string_view secret, std::string_view given) {
  unsigned difference = secret.size() != given.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(secret[i % secret.size()]);
  return difference == 0;
}

}  // namespace

std::optional<HttpReply> Access::preflight(const HttpRequest& request) const {
  if (cors_origin_.empty() || request.method != "OPTIONS") return std::nullopt;
  return HttpReply{.status = 204,
                   .headers = {{"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
                               {"Access-Control-Allow-Headers", "Authorization, Content-Type"},
                               {"Access-Control-Max-Age", "600"}}};
}

// Browsers tell whose page is calling. Others than browsers have no Origin.
std::optional<ApiError> Access::check_page(const HttpRequest& request) const {
  const std::string_view origin = request.header("origin");
  if (origin.empty() || cors_origin_ == "*" || origin == cors_origin_) return std::nullopt;
  const size_t host = origin.find("://");
  if (host != std::string_view::npos && origin.substr(host + 3) == request.header("host")) return std::nullopt;
  return ApiError{.status = 403,
                  .message = "pages of another origin may not call this server (--cors-origin)",
                  .type = "permission_error"};
}

std::optional<ApiError> Access::check_key(const HttpRequest& request) const {
  if (api_keys_.empty()) return std::nullopt;
  std::string_view given = request.header("authorization");
  bool found = false;
  if (given.starts_with("Bearer ")) {
    given.remove_prefix(7);
    for (const std::string& key : api_keys_) found |= equal_in_constant_time(key, given);
  }
  if (found) return std::nullopt;
  return ApiError{.status = 401,
                  .message = "a valid API key is needed: Authorization: Bearer KEY",
                  .type = "authentication_error",
                  .code = "invalid_api_key"};
}

void Access::allow_origin(HttpReply& reply) const {
  if (cors_origin_.empty()) return;
  reply.headers.emplace_back("Access-Control-Allow-Origin", cors_origin_);
  if (cors_origin_ != "*") reply.headers.emplace_back("Vary", "Origin");
}

}  // namespace pagedkv::server
