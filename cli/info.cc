// What this machine offers, and what pagedkv makes of it.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/bench.h"
#include "cli/commands.h"
#include "cli/console.h"
#include "cli/output.h"
#include "engine/engine.h"
#include "pagedkv/cache.h"

namespace pagedkv::cli {
namespace {

using Json = nlohmann::ordered_json;

std::optional<std::string> cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (colon != std::string::npos && line.starts_with("model name")) return line.substr(colon + 2);
  }
  return std::nullopt;  // ARM kernels give numbers only
}

// The word in brackets: "always [madvise] never".
std::optional<std::string> huge_pages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(file, line);
  const size_t begin = line.find('['), end = line.find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return std::nullopt;
  return line.substr(begin + 1, end - begin - 1);
}

Json or_null(const std::optional<std::string>& text) { return text ? Json(*text) : Json(nullptr); }
Json or_null(const std::optional<Bytes>& bytes) { return bytes ? Json(bytes->n) : Json(nullptr); }

struct Machine {
  std::optional<std::string> cpu = cpu_name();
  std::vector<IsaEntry> entries = isa_entries();
  IsaChoice isa;
  std::vector<std::string> product_types;
  std::optional<std::string> huge = huge_pages();
  engine::GgmlBuild ggml = engine::ggml_build();
  int threads = engine::default_threads();
  engine::MachineMemory memory = engine::machine_memory({});
  double read_one = 0, read_all = 0;  // bytes a second; 0: no memory to measure with
};

void print_json(const Machine& m) {
  Json entries = Json::array(), features = Json::object();
  for (const IsaEntry& entry : m.entries)
    entries.push_back(Json{{"name", entry.name}, {"supported", entry.supported}});
  for (const auto& [name, value] : m.ggml.features) features[name] = value;
  const auto rate = [](double bytes) { return bytes > 0 ? Json(bytes / 1e9) : Json(nullptr); };
  const Json out{{"version", PAGEDKV_VERSION},
                 {"cpu", or_null(m.cpu)},
                 {"threads", m.threads},
                 {"isa", Json{{"entries", entries},
                              {"runs", m.isa.name},
                              {"because", m.isa.by_environment ? "PAGEDKV_ISA" : "best supported"}}},
                 {"products", m.product_types},
                 {"huge_pages", or_null(m.huge)},
                 {"ggml", Json{{"version", m.ggml.version}, {"features", features}}},
                 {"read_gbps", Json{{"one_thread", rate(m.read_one)}, {"all_threads", rate(m.read_all)}}},
                 {"memory", Json{{"ram", or_null(m.memory.ram)},
                                 {"cgroup", or_null(m.memory.cgroup)},
                                 {"limit", m.memory.limit.n},
                                 {"kv_memory", m.memory.default_kv_memory.n}}}};
  print_out("{}\n", out.dump(1, ' ', false, Json::error_handler_t::replace));
}

void print_table(const Machine& m) {
  std::string entries, features;
  for (const IsaEntry& entry : m.entries)
    entries += (entries.empty() ? "" : ", ") + entry.name + (entry.supported ? "" : " (not on this machine)");
  for (const auto& [name, value] : m.ggml.features)
    features += (features.empty() ? "" : " ") + name + (value == "1" ? "" : "=" + value);
  const auto rate = [](double bytes) { return bytes > 0 ? fmt::format("{:.1f} GB/s", bytes / 1e9) : "no memory"; };
  const auto size = [](const std::optional<Bytes>& bytes, const char* none) {
    return bytes ? human_bytes(bytes->n) : std::string(none);
  };
  const std::vector<std::vector<std::string>> rows = {
      {"pagedkv", PAGEDKV_VERSION},
      {"CPU", m.cpu.value_or("unknown")},
      {"threads", fmt::format("{} (affinity and cgroup quota)", m.threads)},
      {"kernels", entries},
      {"", fmt::format("{} runs: {}", m.isa.name,
                       m.isa.by_environment ? "PAGEDKV_ISA says so" : "the best that this machine supports")},
      {"products", m.product_types.empty()
                       ? "ggml's"
                       : fmt::format("{}; ggml's for the others", fmt::join(m.product_types, " "))},
      {"huge pages", !m.huge              ? "unknown"
                     : *m.huge == "never" ? "never: reading K and V will be slower"
                                          : *m.huge},
      {"ggml", m.ggml.version},
      {"", features},
      {"reading", fmt::format("{} by 1 thread, {} by {}", rate(m.read_one), rate(m.read_all), m.threads)},
      {"RAM", size(m.memory.ram, "unknown")},
      {"cgroup limit", size(m.memory.cgroup, "none")},
      {"K and V",
       fmt::format("{} by default, less the model's weights", human_bytes(m.memory.default_kv_memory.n))}};
  print_out("{}", table(rows, {Align::kLeft, Align::kLeft}));
}

}  // namespace

int info(const InfoOptions& options) {
  Machine machine;
  auto isa = default_isa();
  if (!isa.ok()) return fail(isa.status());
  machine.isa = *isa;
  auto types = engine::own_product_types();
  if (!types.ok()) return fail(types.status());
  machine.product_types = *types;
  machine.read_one = bench::read_rate(1);
  machine.read_all = bench::read_rate(machine.threads);
  if (options.json) {
    print_json(machine);
  } else {
    print_table(machine);
  }
  return finish("info");
}

}  // namespace pagedkv::cli
