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

std::vector<std::string> products_row(const engine::ProductsInfo& products) {
  const int64_t all = products.n_own + products.n_ggml;
  if (products.n_own == 0) return {"products", "ggml", fmt::format("all {} weights", all)};
  return {"products", products.isa,
          products.n_ggml == 0
              ? fmt::format("all {} weights by our kernels", all)
              : fmt::format("{} of {} weights by our kernels, the others by ggml", products.n_own, all)};
}

}  // namespace pagedkv::cli
