// A conversation: pagedkv run -i.
#pragma once

#include "cli/options.h"
#include "engine/engine.h"

namespace pagedkv::cli {

// Reads messages and commands from stdin until it ends; answers go to stdout, all else to stderr. Returns the exit
// code: 1 when stdin is no terminal and a message was refused or a command failed.
int chat(const RunOptions& options, engine::Engine& engine);

}  // namespace pagedkv::cli
