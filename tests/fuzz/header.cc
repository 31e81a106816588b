// Any request line and headers, as far as they are read behind Beast: whose they are, and whether they may ask. A
// name that is not the server's never passes, however it is spelled.
#include <cstdint>
#include <string>

#include "server/access.h"
#include "server/target.h"
#include "tests/fuzz/require.h"

namespace {

using namespace pagedkv::server;

}  // namespace

// "target\nhost\nauthorization\norigin"
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  std::string parts[4];
  size_t at = 0;
  for (size_t i = 0; i < size; ++i) {
    const char c = char(bytes[i]);
    if (c == '\n' && at < 3)
      ++at;
    else
      parts[at] += c;
  }
  static const Access access({.host = "127.0.0.1", .allowed_hosts = {"llm.example"}, .api_keys = {"secret"}});
  HttpRequest request{.method = "POST", .host = parts[1]};
  request.headers = {{"authorization", parts[2]}, {"origin", parts[3]}};
  if (const auto target = read_target(parts[0])) {
    request.path = target->path;
    request.query = target->query;
    if (!target->authority.empty()) request.host = target->authority;
  }
  const auto host = host_of(request.host);
  if (!access.check_host(request) && host && !request.host.empty()) {
    const bool own = *host == "localhost" || *host == "llm.example" || host->starts_with("127.") ||
                     host->ends_with(".localhost") || host->find(':') != std::string::npos;
    require(own);
  }
  if (!access.check_key(request)) {
    require(parts[2].size() >= 6 && parts[2].find("secret") != std::string::npos);
  }
  static_cast<void>(access.check_page(request));
  static_cast<void>(access.preflight(request));
  HttpReply reply;
  access.allow_origin(reply);
  return 0;
}
