// Prints what bench/ measured.
#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/console.h"

namespace pagedkv::cli {
namespace {

using Json = nlohmann::ordered_json;

Json number(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? Json(*value) : Json(nullptr);
}

Json word(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

Json to_json(const bench::Record& r) {
  return Json{{"case", r.name},           {"format", word(r.format)},
              {"heads_q", r.heads_q},     {"heads_kv", r.heads_kv},
              {"head_dim", r.head_dim},   {"batch", r.batch},
              {"tokens", r.tokens},       {"threads", r.threads},
              {"isa", word(r.isa)},       {"seconds", number(r.seconds)},
              {"p10", number(r.p10)},     {"p90", number(r.p90)},
              {"runs", r.runs},           {"gbps", number(r.gbps)},
              {"share", number(r.share)}, {"roofline", number(r.roofline)},
              {"peer", word(r.peer)},     {"peer_seconds", number(r.peer_seconds)},
              {"ratio", number(r.ratio)}};
}

}  // namespace

int bench(const BenchCommand& command) {
  using Kind = BenchCommand::Kind;
  const bench::BenchOptions& options = command.options;
  std::ostream& table = options.json ? std::cerr : std::cout;
  const auto records = command.kind == Kind::kCache     ? bench::bench_cache(options, table)
                       : command.kind == Kind::kKernels ? bench::bench_kernels(options, table)
                                                        : bench::bench_model(options, table);
  if (!records.ok()) return fail(records.status());
  if (options.json) {
    Json all = Json::array();
    for (const bench::Record& record : *records) all.push_back(to_json(record));
    std::cout << all.dump(1) << "\n";
  }
  std::cout.flush();
  return std::cout ? 0 : fail(Status(Code::kUnavailable, "[bench] stdout cannot be written"));
}

}  // namespace pagedkv::cli
