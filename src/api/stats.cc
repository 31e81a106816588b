// The counters as JSON: one schema from C++ to HTTP.

#include "pagedkv/stats.h"

#include "base/text.h"

namespace pagedkv {
namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out + "\"";
}

template <class Value, class Write>
std::string object(const std::map<std::string, Value>& values, const Write& write) {
  std::string out = "{";
  for (const auto& [name, value] : values) out += (out.size() > 1 ? ", " : "") + quoted(name) + ": " + write(value);
  return out + "}";
}

}  // namespace

std::string to_json(const Stats& s) {
  std::string out = "{";
  const auto field = [&](const char* name, const std::string& value) {
    out += (out.size() > 1 ? ", " : "") + quoted(name) + ": " + value;
  };
  const auto number = [](int64_t n) { return std::to_string(n); };
  field("bytes_reserved", number(s.bytes_reserved));
  field("bytes_committed", number(s.bytes_committed));
  field("bytes_resident", number(s.bytes_resident));
  field("bytes_in_use", number(s.bytes_in_use));
  field("extent_bytes", number(s.extent_bytes));
  field("blocks_total", number(s.blocks_total));
  field("blocks_free", number(s.blocks_free));
  field("blocks_open", number(s.blocks_open));
  field("blocks_full", number(s.blocks_full));
  field("blocks_shared", number(s.blocks_shared));
  field("blocks_cached", number(s.blocks_cached));
  field("block_utilization", str(s.block_utilization));
  field("sequences", number(s.sequences));
  field("tokens", number(s.tokens));
  field("alloc_events", number(s.alloc_events));
  field("growth_events", number(s.growth_events));
  field("growth_bytes_copied", number(s.growth_bytes_copied));
  field("shrink_events", number(s.shrink_events));
  field("evictions", number(s.evictions));
  field("copies", number(s.copies));
  field("keyed_passed_over", number(s.keyed_passed_over));
  field("quarantined_blocks", number(s.quarantined_blocks));
  field("dense_materializations", number(s.dense_materializations));
  field("dequantized_rows", number(s.dequantized_rows));
  field("floor_clamped_rows", number(s.floor_clamped_rows));
  field("saturated_values", number(s.saturated_values));
  field("fallbacks", object(s.fallbacks, quoted));
  field("kernel_calls", object(s.kernel_calls, number));
  field("hits",
        "{\"tokens\": " + number(s.hit_tokens) + ", \"by_reason\": " + object(s.hits_by_reason, number) + "}");
  return out + "}";
}

}  // namespace pagedkv
