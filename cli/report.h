// The counters of a cache, for people and for programs.
#pragma once

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

#include "engine/engine.h"
#include "pagedkv/stats.h"

namespace pagedkv::cli {

nlohmann::ordered_json stats_json(const Stats& stats);
void print_stats(const Stats& stats);  // a table on stderr

// Row of a table: who multiplies with how many weights.
std::vector<std::string> products_row(const engine::ProductsInfo& products);

}  // namespace pagedkv::cli
