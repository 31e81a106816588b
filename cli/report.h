// The counters of a cache, for people and for programs.
#pragma once

#include <nlohmann/json.hpp>

#include "pagedkv/stats.h"

namespace pagedkv::cli {

nlohmann::ordered_json stats_json(const Stats& stats);
void print_stats(const Stats& stats);  // a table on stderr

}  // namespace pagedkv::cli
