// Any text as a format, as K:V, and as a flag of the environment: a Status that quotes it, or a value whose name
// means the same.
#include <cstdint>
#include <string>

#include "base/env.h"
#include "pagedkv/format.h"
#include "pagedkv/log.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace pagedkv;
  static const bool quiet = (set_log_sink([](std::string_view) {}), true);
  (void)quiet;
  const std::string text(reinterpret_cast<const char*>(data), size);

  if (const auto one = parse_format(text); one.ok()) {
    require(*parse_format(format_name(*one)) == *one);
  } else {
    require(one.status().code() == Code::kInvalidArgument &&
            one.status().message().find(text) != std::string::npos);
  }
  const auto both = parse_kv_quant(text);
  if (both.ok()) {
    require(*parse_kv_quant(kv_quant_name(*both)) == *both);
  } else {
    require(both.status().code() == Code::kInvalidArgument && !both.status().message().empty());
  }
  (void)is_foreign_spelling(text);

  if (text.find('\0') != std::string::npos) return 0;  // no value of a variable has one
  setenv("PAGEDKV_QUANT", text.c_str(), 1);
  setenv("PAGEDKV_FUZZ_FLAG", text.c_str(), 1);
  const auto from_env = kv_quant_from_env();
  require(text.empty() ? from_env.ok() : from_env.ok() == both.ok() && (!both.ok() || *from_env == *both));
  const auto flag = env_flag({"PAGEDKV_FUZZ_FLAG"}, true);
  require(flag.ok() || flag.status().message().find(text) != std::string::npos);
  return 0;
}
