// Prints what bench/ measured.
#include <cmath>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/output.h"

namespace pagedkv::cli {
namespace {

using Json = nlohmann::ordered_json;

Json number(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? Json(*value) : Json(nullptr);
}

Json count(const std::optional<int64_t>& value) { return value ? Json(*value) : Json(nullptr); }

Json word(const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); }

Json to_json(const bench::Record& r) {
  return Json{{"case", r.name},
              {"format", word(r.format)},
              {"heads_q", r.heads_q},
              {"heads_kv", r.heads_kv},
              {"head_dim", r.head_dim},
              {"batch", r.batch},
              {"tokens", r.tokens},
              {"threads", r.threads},
              {"isa", word(r.isa)},
              {"seconds", number(r.seconds)},
              {"p10", number(r.p10)},
              {"p90", number(r.p90)},
              {"runs", r.runs},
              {"gbps", number(r.gbps)},
              {"share", number(r.share)},
              {"roofline", number(r.roofline)},
              {"peer", word(r.peer)},
              {"peer_seconds", number(r.peer_seconds)},
              {"ratio", number(r.ratio)},
              {"slow_samples", count(r.slow_samples)},
              {"slow_kept", count(r.slow_kept)},
              {"arena_huge", number(r.arena_huge)}};
}

Json to_json(const bench::LimitRecord& r) {
  return Json{{"limit", r.limit},       {"pages", word(r.pages)}, {"threads", r.threads},
              {"path", word(r.path)},   {"gbps", number(r.gbps)}, {"median_gbps", number(r.median_gbps)},
              {"gops", number(r.gops)}, {"huge", number(r.huge)}, {"note", word(r.note)}};
}

template <class AnyRecord>
int print(const Result<std::vector<AnyRecord>>& records, bool json) {
  if (!records.ok()) return fail(records.status());
  if (json) {
    Json all = Json::array();
    for (const AnyRecord& record : *records) all.push_back(to_json(record));
    print_out("{}\n", all.dump(1));
  }
  out_stream().flush();
  err_stream().flush();
  return finish("bench");
}

}  // namespace

int bench(const BenchCommand& command) {
  using Kind = BenchCommand::Kind;
  const bench::BenchOptions& options = command.options;
  std::ostream& table = options.json ? err_stream() : out_stream();
  if (command.kind == Kind::kLimits) return print(bench::bench_limits(options, table), options.json);
  return print(command.kind == Kind::kCache      ? bench::bench_cache(options, table)
               : command.kind == Kind::kKernels  ? bench::bench_kernels(options, table)
               : command.kind == Kind::kProducts ? bench::bench_products(options, table)
                                                 : bench::bench_model(options, table),
               options.json);
}

}  // namespace pagedkv::cli
