#include "server/access.h"

#include <openssl/crypto.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <boost/url.hpp>
#include <cstdint>
#include <string_view>
#include <utility>

#include "server/target.h"

namespace pagedkv::server {
namespace {

namespace urls = boost::urls;
using urls::grammar::ci_is_equal;

std::string machine_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "";
  return host_of(name.data()).value_or("");
}

enum class Address : uint8_t { kNone, kLoopback, kUnspecified, kOther };

// What sort of IP address `host` is.
Address address_of(const std::string& host) {
  const auto sort = [](const auto& address) {
    return address.is_loopback()      ? Address::kLoopback
           : address.is_unspecified() ? Address::kUnspecified
                                      : Address::kOther;
  };
  if (const auto v4 = urls::parse_ipv4_address(host)) return sort(*v4);
  if (const auto v6 = urls::parse_ipv6_address(host)) return sort(*v6);
  return Address::kNone;
}

// The time tells nothing but whether the lengths are equal.
bool equal_in_constant_time(std::string_view secret, std::string_view given) {
  return secret.size() == given.size() && CRYPTO_memcmp(secret.data(), given.data(), secret.size()) == 0;
}

}  // namespace

Access::Access(AccessRules rules)
    : rules_([&] {
        for (std::string& name : rules.allowed_hosts) name = host_of(name).value_or(name);
        return std::move(rules);
      }()),
      any_address_(address_of(rules_.host) == Address::kUnspecified) {}

std::optional<ApiError> Access::check_host(const HttpRequest& request) const {
  const auto& allowed = rules_.allowed_hosts;
  const auto is_allowed = [&](std::string_view name) {
    return std::find(allowed.begin(), allowed.end(), name) != allowed.end();
  };
  // HTTP/1.0 knows no Host, and no browser speaks it.
  if (is_allowed("*") || request.host.empty()) return std::nullopt;
  const auto host = host_of(request.host);
  if (host) {
    const Address address = address_of(*host);
    if (address == Address::kLoopback || (any_address_ && address != Address::kNone)) return std::nullopt;
    if (*host == "localhost" || host->ends_with(".localhost") || *host == rules_.host || is_allowed(*host) ||
        (any_address_ && *host == machine_name()))
      return std::nullopt;
  }
  return ApiError{.status = 403,
                  .message = "this server is not called \"" + request.host.substr(0, 200) + "\" (--allowed-host)",
                  .type = "permission_error",
                  .code = "host_not_allowed"};
}

std::optional<HttpReply> Access::preflight(const HttpRequest& request) const {
  if (rules_.cors_origin.empty() || request.method != "OPTIONS") return std::nullopt;
  // Whatever headers a page of a welcome origin wants to send: those of clients are many, and none is a danger.
  std::string headers = "Authorization, Content-Type";
  const std::string_view asked = request.header("access-control-request-headers");
  if (!asked.empty() && asked.size() <= 4096) headers = asked;
  return HttpReply{.status = 204,
                   .headers = {{"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
                               {"Access-Control-Allow-Headers", headers},
                               {"Access-Control-Max-Age", "600"}}};
}

// Browsers tell whose page is calling. Others than browsers have no Origin.
std::optional<ApiError> Access::check_page(const HttpRequest& request) const {
  const std::string_view origin = request.header("origin");
  if (origin.empty() || rules_.cors_origin == "*" || origin == rules_.cors_origin) return std::nullopt;
  const size_t host = origin.find("://");
  if (host != std::string_view::npos && ci_is_equal(origin.substr(host + 3), request.host)) return std::nullopt;
  return ApiError{.status = 403,
                  .message = "pages of another origin may not call this server (--cors-origin)",
                  .type = "permission_error"};
}

std::optional<ApiError> Access::check_key(const HttpRequest& request) const {
  if (rules_.api_keys.empty()) return std::nullopt;
  constexpr std::string_view kScheme = "Bearer ";
  std::string_view given = request.header("authorization");
  bool found = false;
  if (ci_is_equal(given.substr(0, kScheme.size()), kScheme)) {
    given.remove_prefix(kScheme.size());
    for (const std::string& key : rules_.api_keys) found |= equal_in_constant_time(key, given);
  }
  if (found) return std::nullopt;
  return ApiError{.status = 401,
                  .message = "a valid API key is needed: Authorization: Bearer KEY",
                  .type = "authentication_error",
                  .code = "invalid_api_key"};
}

void Access::allow_origin(HttpReply& reply) const {
  if (rules_.cors_origin.empty()) return;
  reply.headers.emplace_back("Access-Control-Allow-Origin", rules_.cors_origin);
  reply.headers.emplace_back("Access-Control-Expose-Headers", "X-Request-Id, X-Ignored-Fields, Retry-After");
  if (rules_.cors_origin != "*") reply.headers.emplace_back("Vary", "Origin");
}

}  // namespace pagedkv::server
