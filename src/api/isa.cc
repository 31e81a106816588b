#include "api/isa.h"

#include "base/env.h"
#include "base/text.h"
#include "pagedkv/cache.h"

namespace pagedkv {

Result<const kernels::Entry*> choose_entry(const std::string& asked) {
  std::string name = asked;
  if (name.empty())
    if (const auto from_env = env_first({"PAGEDKV_ISA"})) name = from_env->value;
  if (const kernels::Entry* entry = kernels::find_entry(name)) return entry;
  std::string known;
  for (const kernels::Entry& entry : kernels::entries())
    if (entry.supported()) known += (known.empty() ? "" : ", ") + std::string(entry.name);
  return invalid_argument(str("[cache] instruction set \"", name, "\" is not one that runs here: ", known));
}

std::vector<IsaEntry> isa_entries() {
  std::vector<IsaEntry> out;
  for (const kernels::Entry& entry : kernels::entries())
    out.push_back({.name = std::string(entry.name), .supported = entry.supported()});
  return out;
}

Result<IsaChoice> default_isa() {
  const auto entry = choose_entry("");
  if (!entry.ok()) return entry.status();
  return IsaChoice{.name = std::string((*entry)->name), .by_environment = env_first({"PAGEDKV_ISA"}).has_value()};
}

}  // namespace pagedkv
