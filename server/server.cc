#include "server/server.h"

#include <atomic>
#include <cstdlib>
#include <thread>
#include <utility>

#include "server/service.h"

namespace pagedkv::server {
namespace {

constexpr double kLookEvery = 0.05;  // seconds between two looks whether the last request is done
constexpr double kFlush = 0.2;       // for the last bytes to leave

// One server from bind to the end. Members are destroyed in the reverse order: the scheduler before the model.
class Server {
 public:
  Server(const ServerOptions& options, const Loader& load) : options_(options), load_(load), service_(options) {}

  Status run() {
    auto http = HttpServer::bind(
        options_.http, [this](const std::shared_ptr<Exchange>& e) { service_.handle(e); },
        [this](HttpReply& refusal) { service_.note_refusal(refusal); });
    if (!http.ok()) return http.status();
    http_ = std::move(*http);
    if (options_.on_listening) options_.on_listening(http_->port());
    std::thread loader([this] { load_model(); });
    http_->run([this](int n) { on_signal(n); });
    // A model that is still being loaded cannot be told to stop.
    if (!loaded_.load()) std::_Exit(0);
    loader.join();
    if (scheduler_) scheduler_->stop();
    // The last word on whether every block was given back: a server that lost one says so.
    if (status_.ok() && model_) status_ = model_->cache().verify();
    return status_;
  }

 private:
  void load_model() {
    auto model = load_([this](double fraction) { service_.show_progress(fraction); });
    Status status = model.status();
    if (status.ok()) {
      model_ = std::move(*model);
      auto scheduler = engine::Scheduler::start(*model_, options_.scheduler);
      status = scheduler.status();
      if (status.ok()) scheduler_ = std::move(*scheduler);
    }
    if (status.ok()) {
      service_.open(*model_, *scheduler_, *http_);
      if (options_.on_ready) options_.on_ready(*model_);
    } else {
      service_.fail(status);
      status_ = status;
    }
    loaded_.store(true);
    if (!status.ok()) http_->stop();
  }

  // The I/O thread.
  void on_signal(int n) {
    if (n > 1) std::_Exit(130);
    service_.drain();
    http_->stop_accepting();
    wait_for_requests(options_.stop_seconds);
  }

  void wait_for_requests(double left) {
    if (!loaded_.load() || !scheduler_ || scheduler_->open_requests() == 0) return leave();
    if (left <= 0) {
      // Off the I/O thread: it must not wait for a step to end.
      std::thread([this] {
        scheduler_->stop();
        leave();
      }).detach();
      return;
    }
    http_->after(kLookEvery, [this, left] { wait_for_requests(left - kLookEvery); });
  }

  void leave() {
    http_->after(kFlush, [this] { http_->stop(); });
  }

  const ServerOptions options_;
  const Loader load_;
  Service service_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<engine::StepModel> model_;
  std::unique_ptr<engine::Scheduler> scheduler_;
  std::atomic<bool> loaded_{false};
  Status status_;
};

}  // namespace

Status serve(const ServerOptions& options, const Loader& load) { return Server(options, load).run(); }

}  // namespace pagedkv::server
