// An OpenAI-compatible server in front of one model.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/scheduler.h"
#include "engine/step_model.h"
#include "engine/text.h"
#include "pagedkv/status.h"
#include "server/http.h"

namespace pagedkv::server {

struct ServerOptions {
  HttpOptions http;
  engine::SchedulerOptions scheduler;
  std::vector<std::string> model_names;    // at least one; requests may use any, the first is shown
  engine::SamplingOptions sampling;        // what requests get that say nothing
  Tokens max_tokens{-1};                   // the same; < 0: until the context is full
  std::vector<std::string> allowed_hosts;  // further names by which clients may call it; "*": any (see access.h)
  std::vector<std::string> api_keys;       // none: no key is asked for
  std::string cors_origin;                 // pages of this origin may call; "*": any; empty: only our own page
  double stop_seconds = 5;    // requests in progress get so long to finish when the server is told to stop
  double stall_seconds = 60;  // a step that takes longer makes /health say 503. Larger: slow prompts look healthy
  bool log_json = false;      // one JSON object a line instead of key=value
  bool log_prompts = false;   // also the text of prompts; off: no text of anybody is logged
  std::string version;
  std::function<void(const std::string& line)> log = {};  // a line a request; any thread
  std::function<int64_t()> lost_log_lines = {};           // lines that `log` could not write; any thread
  std::function<void(int port)> on_listening = {};        // before the model is loaded
  std::function<void(engine::StepModel& model)> on_ready = {};
};

// Makes the model while the server already answers /health. Called on a thread of its own.
using Loader =
    std::function<Result<std::unique_ptr<engine::StepModel>>(const std::function<void(double fraction)>& progress)>;

// Serves until SIGINT or SIGTERM: then no new requests, those in progress finish or are cut off after stop_seconds,
// and ok comes back. A second signal ends the process at once. Errors: those of HttpServer::bind, of
// Scheduler::start and of the loader; kInternal when the cache is broken at the end.
Status serve(const ServerOptions& options, const Loader& load);

}  // namespace pagedkv::server
