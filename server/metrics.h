// Figures in Prometheus' text format.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "engine/scheduler.h"
#include "server/http.h"

namespace pagedkv::server {

struct MetricsInput {
  std::string version, model, isa, kv_quant;
  bool loaded = false;  // else there are no figures yet but those of replies
  bool ready = false;
  engine::SchedulerStats scheduler;
  HttpFigures http;
  int64_t lost_log_lines = 0;
  std::map<std::pair<std::string, int>, int64_t> replies;  // (path, status) -> count
};

std::string metrics_text(const MetricsInput& input);

}  // namespace pagedkv::server
