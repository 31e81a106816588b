// What the records of all benches have in common, and how they come from the names of cases.
#pragma once

#include <string>
#include <vector>

#include "bench/bench.h"
#include "bench/measure.h"

namespace pagedkv::bench {

inline void set_seconds(Record& r, const std::vector<double>& samples) {
  const Spread spread = spread_of(samples);
  r.seconds = spread.median;
  r.p10 = spread.p10;
  r.p90 = spread.p90;
  r.runs = int64_t(samples.size());
}

// Nothing where no peer ran. Requires: set_seconds before.
inline void set_peer(Record& r, const std::string& name, const std::vector<double>& samples) {
  if (samples.empty()) return;
  r.peer = name;
  r.peer_seconds = spread_of(samples).median;
  r.ratio = *r.peer_seconds / r.seconds;
}

// The cases of these names, or why the first that cannot be one is none.
template <class Case>
Result<std::vector<Case>> parse_cases(const std::vector<std::string>& names,
                                      Result<Case> (*parse)(const std::string& name)) {
  std::vector<Case> cases;
  for (const std::string& name : names) {
    auto parsed = parse(name);
    if (!parsed.ok()) return parsed.status();
    cases.push_back(std::move(*parsed));
  }
  return cases;
}

}  // namespace pagedkv::bench
