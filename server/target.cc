#include "server/target.h"

#include <algorithm>
#include <boost/url.hpp>
#include <cctype>

namespace pagedkv::server {

namespace urls = boost::urls;

std::optional<Target> read_target(std::string_view target) {
  if (target == "*") return Target{.path = "*", .query = {}, .authority = ""};
  const bool origin = target.starts_with('/');
  const auto url = origin ? urls::parse_origin_form(target) : urls::parse_uri(target);
  if (!url || (!origin && url->scheme_id() != urls::scheme::http && url->scheme_id() != urls::scheme::https))
    return std::nullopt;
  Target out{.path = url->path(), .query = {}, .authority = std::string(url->encoded_host_and_port())};
  if (out.path.empty()) out.path = "/";
  for (const auto& parameter : url->params()) out.query.emplace_back(parameter.key, parameter.value);
  return out;
}

std::optional<std::string> host_of(std::string_view authority) {
  const auto parsed = urls::parse_authority(authority);
  if (!parsed || parsed->has_userinfo() || parsed->encoded_host().empty()) return std::nullopt;
  std::string host = parsed->host_type() == urls::host_type::name ? parsed->host_name() : parsed->host_address();
  std::transform(host.begin(), host.end(), host.begin(), [](unsigned char c) { return std::tolower(c); });
  if (host.ends_with('.')) host.pop_back();  // the same name, written out in full
  return host;
}

}  // namespace pagedkv::server
