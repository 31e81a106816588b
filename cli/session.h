// A conversation that is kept under a name beside the blocks of its K and V, to be gone on with another day.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/text.h"
#include "pagedkv/status.h"

namespace pagedkv::cli {

struct Turn {
  engine::ChatMessage user, assistant;
};

struct Session {
  std::optional<std::string> system;
  std::vector<Turn> turns;
};

// FOLDER/sessions/NAME.json. Errors: kInvalidArgument (a name is 1 to 100 letters, digits, '-', '_' and '.', not
// first).
Result<std::string> session_path(const std::string& folder, const std::string& name);
// An empty one if there is no such file. Tokens of an answer that this vocabulary spells otherwise are left out:
// then its text counts. Errors: kCorrupt, kUnavailable.
Result<Session> load_session(const std::string& path, const engine::Text& text);
// Whole or not at all, with mode 0600. Errors: kUnavailable.
Status save_session(const std::string& path, const Session& session);

}  // namespace pagedkv::cli
