// The subcommands. Each returns the exit code: 0, or 1 after its error is on stderr.
#pragma once

#include "cli/options.h"

namespace pagedkv::cli {

int run(const RunOptions& options);  // 130 when cancelled by Ctrl-C
int serve(const ServeOptions& options);
int perplexity(const PerplexityOptions& options);
int inspect(const InspectOptions& options);
int info(const InfoOptions& options);
int completion(const CLI::App& app);  // a script for bash, on stdout
int bench(const BenchCommand& command);

}  // namespace pagedkv::cli
