// The server in front of a scripted model, for tests over HTTP. Arguments are name=value; prints its port on
// stdout.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <thread>

#include "pagedkv/log.h"
#include "server/server.h"
#include "tests/server/scripted_model.h"

int main(int argc, char** argv) {
  using namespace pagedkv;
  std::map<std::string, std::string> words;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    words[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  }
  const auto number = [&](const char* name, double otherwise) {
    return words.contains(name) ? std::atof(words[name].c_str()) : otherwise;
  };
  set_log_sink(
      [](std::string_view message) { std::fprintf(stderr, "%.*s\n", int(message.size()), message.data()); });
  server::ServerOptions options;
  options.http.port = 0;
  options.http.max_body_bytes = int64_t(number("max_body", 8 << 20));
  options.http.send_buffer_bytes = int64_t(number("send_buffer", 1 << 20));
  options.http.write_seconds = number("write_seconds", 30);
  options.http.header_seconds = number("header_seconds", 10);
  options.http.body_seconds = number("body_seconds", 60);
  options.scheduler.max_num_seqs = int64_t(number("max_num_seqs", 8));
  options.scheduler.max_queue = int64_t(number("max_queue", 128));
  options.scheduler.max_num_batched_tokens = Tokens(int64_t(number("max_num_batched_tokens", 512)));
  options.model_names = {"scripted", "alias", "scripted", "org/plain"};
  options.stop_seconds = number("stop_seconds", 5);
  options.stall_seconds = number("stall_timeout", 60);
  options.version = "0.0.0";
  options.log_json = true;
  options.log = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  if (words.contains("key")) options.api_keys = {words["key"]};
  if (words.contains("host")) options.http.host = words["host"];
  if (words.contains("allowed_host")) options.allowed_hosts = {words["allowed_host"]};
  options.http.max_connections = int64_t(number("max_connections", 4096));
  if (words.contains("cors")) options.cors_origin = words["cors"];
  options.on_listening = [](int port) {
    std::printf("%d\n", port);
    std::fflush(stdout);
  };
  engine::ScriptedOptions script;
  script.block_size = int64_t(number("block_size", 16));
  script.num_blocks = int64_t(number("num_blocks", 256));
  script.context = int64_t(number("context", 2048));
  script.step_seconds = number("step_ms", 0) / 1000;
  script.token_seconds = number("token_ms", 0) / 1000;
  script.stall_seconds = number("stall_seconds", 60);
  const double load_seconds = number("load_seconds", 0);
  const Status status = server::serve(
      options, [&](const std::function<void(double)>& progress) -> Result<std::unique_ptr<engine::StepModel>> {
        for (double t = 0; t < load_seconds; t += 0.05) {
          progress(t / load_seconds);
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        return std::unique_ptr<engine::StepModel>(engine::ScriptedModel::make(script));
      });
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  return status.ok() ? 0 : 1;
}
