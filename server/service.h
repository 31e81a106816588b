// The endpoints: what each answers.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/scheduler.h"
#include "server/access.h"
#include "server/api_error.h"
#include "server/completion_request.h"
#include "server/http.h"
#include "server/json_body.h"
#include "server/request_log.h"
#include "server/server.h"

namespace pagedkv::server {

// handle(), and what requests need of it: any thread, several at once. The rest: the thread that runs the server.
class Service {
 public:
  explicit Service(const ServerOptions& options);
  void handle(const std::shared_ptr<Exchange>& exchange);

  // What /health says until the model is there.
  void show_progress(double fraction) { progress_.store(fraction); }
  // From here on requests are served. All must outlive the service's last request.
  void open(engine::StepModel& model, engine::Scheduler& scheduler, const HttpServer& http);
  void fail(const Status& why);  // the model cannot be loaded
  void drain();                  // no new completions

  // For a request that is being answered.
  engine::Scheduler& scheduler() { return *scheduler_; }
  const engine::Text& text() const { return model_->text(); }
  RequestLog& log() { return log_; }
  void reply(const std::shared_ptr<Exchange>& exchange, HttpReply reply);
  void begin(const std::shared_ptr<Exchange>& exchange, HttpReply head);  // the answer comes in pieces
  void note_refusal(HttpReply& refusal);                                  // of the web side, which sends it itself

 private:
  using Handler = void (Service::*)(const std::shared_ptr<Exchange>&);
  struct Route {
    const char* method;
    const char* path;  // one that ends with '/' (but for "/" itself): and whatever follows
    Handler handler;
    bool open = false;  // without a key
  };
  static const Route* route_of(std::string_view path);
  static const Route kRoutes[];

  void complete(const std::shared_ptr<Exchange>& exchange, Endpoint endpoint);
  void chat(const std::shared_ptr<Exchange>& exchange) { complete(exchange, Endpoint::kChat); }
  void completions(const std::shared_ptr<Exchange>& exchange) { complete(exchange, Endpoint::kCompletions); }
  void models(const std::shared_ptr<Exchange>& exchange);
  void model(const std::shared_ptr<Exchange>& exchange);
  void tokenize(const std::shared_ptr<Exchange>& exchange);
  void detokenize(const std::shared_ptr<Exchange>& exchange);
  void health(const std::shared_ptr<Exchange>& exchange);
  void metrics(const std::shared_ptr<Exchange>& exchange);
  void stats(const std::shared_ptr<Exchange>& exchange);
  void page(const std::shared_ptr<Exchange>& exchange);

  ApiResult<HttpReply> tokenized(const std::string& body) const;
  ApiResult<HttpReply> detokenized(const std::string& body) const;
  void reply(const std::shared_ptr<Exchange>& exchange, const ApiResult<HttpReply>& result);
  void refuse(const std::shared_ptr<Exchange>& exchange, const ApiError& error);
  std::optional<ApiError> not_ready() const;
  void count_reply(const std::string& path, int status);
  void log_refusal(const HttpReply& reply, const std::string& path, const std::string& method);

  const ServerOptions options_;
  const Access access_;
  const int64_t created_;
  RequestLog log_;
  std::atomic<double> progress_{0};
  std::atomic<bool> ready_{false}, draining_{false};
  // Set before ready_, then constant.
  engine::StepModel* model_ = nullptr;
  engine::Scheduler* scheduler_ = nullptr;
  const HttpServer* http_ = nullptr;
  RequestLimits limits_;
  std::string isa_, kv_quant_;

  mutable std::mutex mutex_;
  Status failed_;
  std::atomic<uint64_t> last_id_{0};
};

}  // namespace pagedkv::server
