// What GET /stats tells.
#pragma once

#include <cstdint>
#include <string>

#include "engine/scheduler.h"
#include "server/http.h"
#include "server/json_body.h"

namespace pagedkv::server {

struct StatsInput {
  std::string model, kv_quant, isa;
  Tokens context{0}, block_size{0};
  engine::SchedulerOptions options;
  engine::SchedulerStats scheduler;
  HttpFigures http;
  bool with_blocks = false;  // also each block
};

OrderedJson stats_json(const StatsInput& input);

}  // namespace pagedkv::server
