#include "cli/report.h"

#include <fmt/format.h>

#include <cstdio>

#include "cli/console.h"
#include "cli/output.h"

namespace pagedkv::cli {

nlohmann::ordered_json stats_json(const Stats& stats) { return nlohmann::ordered_json::parse(to_json(stats)); }

void print_stats(const Stats& stats) {
  std::vector<std::vector<std::string>> rows;
  const auto flat = stats_json(stats).flatten();
  for (const auto& [key, value] : flat.items()) {
    if (value.is_null()) continue;  // an empty map
    rows.push_back({key.substr(1), value.is_string() ? value.get<std::string>() : value.dump()});
  }
  print_err("\n{}", table(rows, {Align::kLeft, Align::kRight}, "  "));
}

}  // namespace pagedkv::cli
