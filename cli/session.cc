#include "cli/session.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

namespace pagedkv::cli {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr size_t kLongestName = 100;
constexpr uintmax_t kMostBytes = uintmax_t{256} << 20;

Status unavailable(const std::string& path, int error) {
  return Status(Code::kUnavailable, fmt::format("[session] {}: {}", path, std::strerror(error)));
}

Status damaged(const std::string& path, const std::string& why) {
  return Status(Code::kCorrupt, fmt::format("[session] {} is damaged ({}); move it away to begin anew", path, why));
}

Turn turn_of(const Json& json, const engine::Text& text) {
  Turn turn{.user = {"user", json.at("user").get<std::string>()},
            .assistant = {"assistant", json.at("assistant").get<std::string>()}};
  auto tokens = json.at("tokens").get<std::vector<int32_t>>();
  const bool known =
      std::ranges::all_of(tokens, [&](int32_t token) { return token >= 0 && token < text.vocab_size(); });
  if (known && !tokens.empty() && text.spell(tokens) == turn.assistant.content)
    turn.assistant.tokens = std::move(tokens);
  return turn;
}

bool write_all(int file, const std::string& text) {
  for (size_t at = 0; at < text.size();) {
    const ssize_t n = ::write(file, text.data() + at, text.size() - at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += size_t(n);
  }
  return ::fsync(file) == 0;
}

}  // namespace

Result<std::string> session_path(const std::string& folder, const std::string& name) {
  const auto allowed = [](unsigned char c) {
    return (std::isalnum(c) != 0 && c < 128) || c == '-' || c == '_' || c == '.';
  };
  if (name.empty() || name.size() > kLongestName || name[0] == '.' || !std::ranges::all_of(name, allowed))
    return invalid_argument(fmt::format(
        "[session] \"{}\" is no name: 1 to {} letters, digits, '-', '_' and '.', which is not the first", name,
        kLongestName));
  return fmt::format("{}/sessions/{}.json", folder, name);
}

Result<Session> load_session(const std::string& path, const engine::Text& text) {
  std::error_code error;
  const uintmax_t size = fs::file_size(path, error);
  if (error == std::errc::no_such_file_or_directory) return Session();
  if (error) return unavailable(path, error.value());
  if (size > kMostBytes) return damaged(path, fmt::format("{} bytes, the limit is {}", size, kMostBytes));
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  if (!file) return unavailable(path, EIO);
  try {
    const Json json = Json::parse(content.str());
    Session session;
    if (json.at("version").get<int>() != 1) return damaged(path, "its version is not 1");
    if (!json.at("system").is_null()) session.system = json.at("system").get<std::string>();
    for (const Json& turn : json.at("turns")) session.turns.push_back(turn_of(turn, text));
    return session;
  } catch (const Json::exception& problem) {
    return damaged(path, problem.what());
  }
}

Status save_session(const std::string& path, const Session& session) {
  Json turns = Json::array();
  for (const Turn& turn : session.turns)
    turns.push_back(
        {{"user", turn.user.content}, {"assistant", turn.assistant.content}, {"tokens", turn.assistant.tokens}});
  const Json json = {{"version", 1},
                     {"system", session.system ? Json(*session.system) : Json(nullptr)},
                     {"turns", std::move(turns)}};
  const fs::path folder = fs::path(path).parent_path();
  std::error_code error;
  if (fs::create_directory(folder, error)) fs::permissions(folder, fs::perms::owner_all, error);
  if (error) return unavailable(folder.string(), error.value());
  const std::string part = path + ".part";
  const int file = ::open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (file < 0) return unavailable(part, errno);
  const bool written = write_all(file, json.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
  const int problem = errno;
  ::close(file);
  if (!written) return unavailable(part, problem);
  if (::rename(part.c_str(), path.c_str()) != 0) return unavailable(path, errno);
  return Status();
}

}  // namespace pagedkv::cli
