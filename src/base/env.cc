#include "base/env.h"

#include <cctype>
#include <cstdlib>

#include "base/text.h"
#include "pagedkv/format.h"
#include "pagedkv/log.h"

namespace pagedkv {

std::optional<EnvValue> env_first(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return EnvValue{name, value};
  }
  return std::nullopt;
}

Result<bool> env_flag(std::initializer_list<const char*> names, bool fallback) {
  const auto found = env_first(names);
  if (!found) return fallback;
  std::string word = found->value;
  for (char& c : word) c = char(std::tolower(static_cast<unsigned char>(c)));
  for (const char* yes : {"1", "true", "yes", "on"})
    if (word == yes) return true;
  for (const char* no : {"0", "false", "no", "off"})
    if (word == no) return false;
  return invalid_argument(
      str(found->name, " is \"", found->value, "\"; allowed are 1, true, yes, on, 0, false, no, off"));
}

Result<KvQuantConfig> kv_quant_from_env() {
  const auto found = env_first({"PAGEDKV_QUANT", "MTPLX_VLLM_METAL_PAGED_KV_QUANT", "MTPLX_PAGED_KV_QUANT"});
  if (!found) return KvQuantConfig{};
  auto config = parse_kv_quant(found->value);
  if (!config.ok()) return invalid_argument(str(found->name, ": ", config.status().message()));
  if (is_foreign_spelling(found->value)) {
    notice(str(found->name, "=", found->value, " is the format with one scale a row, not ggml's groups of 32"));
  }
  return config;
}

}  // namespace pagedkv
