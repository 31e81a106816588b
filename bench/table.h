// The table that a person reads while records are made.
#pragma once

#include <cstdio>
#include <ostream>
#include <string>

#include "bench/bench.h"
#include "bench/measure.h"

namespace pagedkv::bench {

inline void print_head(std::ostream& out) {
  char line[160];
  std::snprintf(line, sizeof line, "%-26s %-6s %12s %10s %7s %9s %12s %7s %6s\n", "case", "format", "median",
                "GB/s", "share", "roofline", "peer", "ratio", "slow");
  out << line << std::flush;
}

// What the rows below are held against; `note` says what is wrong with it.
inline void print_limits(std::ostream& out, double read, double f32_ops, double int8_ops, const std::string& note) {
  char line[160];
  std::snprintf(line, sizeof line, "limits: read %.1f GB/s, f32 %.0f GFLOP/s, int8 %.0f GOP/s\n", read / 1e9,
                f32_ops / 1e9, int8_ops / 1e9);
  out << line;
  if (!note.empty()) out << "  note: " << note << "\n";
}

inline std::string time_text(double seconds) {
  char text[32];
  if (seconds < 1e-6)
    std::snprintf(text, sizeof text, "%.1f ns", seconds * 1e9);
  else if (seconds < 1e-3)
    std::snprintf(text, sizeof text, "%.2f us", seconds * 1e6);
  else
    std::snprintf(text, sizeof text, "%.3f ms", seconds * 1e3);
  return text;
}

inline void print_row(std::ostream& out, const Record& r) {
  const auto number = [](const std::optional<double>& value, const char* format) {
    char text[32] = "-";
    if (value) std::snprintf(text, sizeof text, format, *value);
    return std::string(text);
  };
  char line[200];
  std::snprintf(line, sizeof line, "%-26s %-6s %12s %10s %7s %9s %12s %7s %6s\n", r.name.c_str(),
                r.format.empty() ? "-" : r.format.c_str(), time_text(r.seconds).c_str(),
                number(r.gbps, "%.1f").c_str(), number(r.share, "%.2f").c_str(), number(r.roofline, "%.2f").c_str(),
                r.peer_seconds ? time_text(*r.peer_seconds).c_str() : "-", number(r.ratio, "%.2f").c_str(),
                r.slow_samples ? std::to_string(*r.slow_samples).c_str() : "-");
  out << line;
  if (r.slow_kept.value_or(0) > 0)
    out << "  note: " << *r.slow_kept << " of the samples are of a slow spell, too few others came\n";
  if (const std::string note = page_note("this cache", r.arena_huge); !note.empty())
    out << "  note: " << note << "\n";
  out << std::flush;
}

}  // namespace pagedkv::bench
