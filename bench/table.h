// The table that a person reads while records are made.
#pragma once

#include <cstdio>
#include <ostream>
#include <string>

#include "bench/bench.h"

namespace pagedkv::bench {

inline void print_head(std::ostream& out) {
  char line[160];
  std::snprintf(line, sizeof line, "%-26s %-6s %12s %10s %7s %9s %12s %7s\n", "case", "format", "median", "GB/s",
                "share", "roofline", "peer", "ratio");
  out << line << std::flush;
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
  std::snprintf(line, sizeof line, "%-26s %-6s %12s %10s %7s %9s %12s %7s\n", r.name.c_str(),
                r.format.empty() ? "-" : r.format.c_str(), time_text(r.seconds).c_str(),
                number(r.gbps, "%.1f").c_str(), number(r.share, "%.2f").c_str(), number(r.roofline, "%.2f").c_str(),
                r.peer_seconds ? time_text(*r.peer_seconds).c_str() : "-", number(r.ratio, "%.2f").c_str());
  out << line << std::flush;
}

}  // namespace pagedkv::bench
