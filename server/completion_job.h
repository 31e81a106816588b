// One request of a completion endpoint, from its submission to its last byte.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/scheduler.h"
#include "server/completion_reply.h"
#include "server/completion_request.h"
#include "server/http.h"

namespace pagedkv::server {

class Service;

// The I/O thread's, but for start() and the sinks' calls, which only hand over to it.
class CompletionJob : public std::enable_shared_from_this<CompletionJob> {
 public:
  // `service` must outlive it. body: to be logged, or empty.
  CompletionJob(Service& service, std::shared_ptr<Exchange> exchange, CompletionRequest request, std::string id,
                std::string body);
  void start();  // any thread, once

 private:
  class Sink;

  std::vector<std::pair<std::string, std::string>> headers() const;
  void begin();
  void add(const engine::Delta& delta);
  void end(const Status& status, const engine::Usage& usage);
  int finish();  // the last bytes; returns the status that is told
  void log(int status) const;

  Service& service_;
  const std::shared_ptr<Exchange> exchange_;
  CompletionRequest request_;
  const std::string id_, body_;
  const int64_t n_;
  std::vector<engine::RequestId> ids_;
  CompletionReply reply_;
  int64_t left_ = 0;  // prompts that have not ended
  bool begun_ = false, over_ = false;
  std::string finishes_;
  Status failed_;
  engine::Usage usage_;
};

}  // namespace pagedkv::server
