#include "server/completion_job.h"

#include <algorithm>
#include <cmath>

#include "server/service.h"

namespace pagedkv::server {
namespace {

double rounded(double seconds) { return double(std::llround(seconds * 1e4)) / 1e4; }

void add_to(engine::Usage& sum, const engine::Usage& usage) {
  sum.prompt_tokens += usage.prompt_tokens;
  sum.cached_tokens += usage.cached_tokens;
  sum.completion_tokens += usage.completion_tokens;
  sum.preemptions += usage.preemptions;
  sum.reason = usage.reason;
  sum.queue_seconds = std::max(sum.queue_seconds, usage.queue_seconds);
  sum.first_token_seconds = std::max(sum.first_token_seconds, usage.first_token_seconds);
  sum.total_seconds = std::max(sum.total_seconds, usage.total_seconds);
}

}  // namespace

// Hands what the scheduler says to the I/O thread.
class CompletionJob::Sink : public engine::RequestSink {
 public:
  Sink(std::shared_ptr<CompletionJob> job, int64_t first_choice) : job_(std::move(job)), first_(first_choice) {}
  void on_delta(engine::Delta delta) override {
    delta.choice += first_;
    job_->exchange_->defer([job = job_, delta = std::move(delta)] { job->add(delta); });
  }
  void on_end(const Status& status, const engine::Usage& usage) override {
    job_->exchange_->defer([job = std::move(job_), status, usage] { job->end(status, usage); });
  }

 private:
  std::shared_ptr<CompletionJob> job_;
  const int64_t first_;
};

CompletionJob::CompletionJob(Service& service, std::shared_ptr<Exchange> exchange, CompletionRequest request,
                             std::string id, std::string body)
    : service_(service),
      exchange_(std::move(exchange)),
      request_(std::move(request)),
      id_(std::move(id)),
      body_(std::move(body)),
      n_(request_.prompts.front().n),
      reply_(request_.endpoint, id_, request_.model, unix_seconds(), n_ * std::ssize(request_.prompts),
             request_.logprobs, request_.include_usage, service.text()) {}

void CompletionJob::start() {
  left_ = std::ssize(request_.prompts);
  for (size_t i = 0; i < request_.prompts.size(); ++i) {
    auto id = service_.scheduler().submit(std::move(request_.prompts[i]),
                                          std::make_shared<Sink>(shared_from_this(), int64_t(i) * n_));
    if (!id.ok()) {
      // The others are not wanted without it.
      for (const engine::RequestId other : ids_) service_.scheduler().cancel(other);
      const ApiError error = api_error(id.status());
      exchange_->defer([self = shared_from_this(), error] {
        self->over_ = true;
        self->service_.reply(self->exchange_, error_reply(error));
      });
      return;
    }
    ids_.push_back(*id);
  }
  exchange_->on_gone([self = shared_from_this()] {
    for (const engine::RequestId id : self->ids_) self->service_.scheduler().cancel(id);
  });
  if (request_.stream) exchange_->defer([self = shared_from_this()] { self->begin(); });
}

std::vector<std::pair<std::string, std::string>> CompletionJob::headers() const {
  std::vector<std::pair<std::string, std::string>> out{{"X-Request-Id", id_}};
  if (!request_.ignored.empty()) {
    std::string names;
    for (const std::string& name : request_.ignored) names += (names.empty() ? "" : ", ") + name;
    std::replace_if(
        names.begin(), names.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }, '?');
    out.emplace_back("X-Ignored-Fields", names.substr(0, 1024));
  }
  return out;
}

void CompletionJob::begin() {
  if (begun_ || over_) return;
  begun_ = true;
  auto all = headers();
  all.emplace_back("Cache-Control", "no-cache");
  service_.begin(exchange_, {.content_type = "text/event-stream", .body = "", .headers = std::move(all)});
}

void CompletionJob::add(const engine::Delta& delta) {
  if (over_) return;
  if (delta.finish) finishes_ += (finishes_.empty() ? "" : ",") + std::string(finish_reason_name(*delta.finish));
  if (!request_.stream) {
    reply_.add(delta);
    return;
  }
  begin();
  exchange_->send(reply_.events(delta));
}

void CompletionJob::end(const Status& status, const engine::Usage& usage) {
  add_to(usage_, usage);
  if (!status.ok() && failed_.ok()) failed_ = status;
  if (--left_ > 0 || over_) return;
  if (failed_.ok() && request_.stream) begin();  // an answer without text has not begun
  over_ = true;
  log(finish());
}

int CompletionJob::finish() {
  if (failed_.ok() && !request_.stream) {
    service_.reply(exchange_, {.body = reply_.whole(usage_), .headers = headers()});
    return 200;
  }
  const ApiError error = failed_.ok() ? ApiError{.status = 200} : api_error(failed_);
  if (!begun_) {
    service_.reply(exchange_, error_reply(error));
  } else if (failed_.ok()) {
    exchange_->send(reply_.last_events(usage_));
    exchange_->finish();
  } else {
    exchange_->send(CompletionReply::error_event(error));
    exchange_->abandon();
  }
  return error.status;
}

void CompletionJob::log(int status) const {
  OrderedJson line = {{"id", id_},
                      {"path", exchange_->request().path},
                      {"status", status},
                      {"stream", request_.stream},
                      {"prompt_tokens", usage_.prompt_tokens},
                      {"cached_tokens", usage_.cached_tokens},
                      {"reason", prefix_reason_name(usage_.reason)},
                      {"completion_tokens", usage_.completion_tokens},
                      {"finish", failed_.ok() ? (finishes_.empty() ? "cancelled" : finishes_) : "error"},
                      {"preemptions", usage_.preemptions},
                      {"queue_s", rounded(usage_.queue_seconds)},
                      {"first_token_s", rounded(usage_.first_token_seconds)},
                      {"total_s", rounded(usage_.total_seconds)}};
  if (!request_.user.empty()) line["user"] = request_.user;
  if (!request_.ignored.empty()) line["ignored"] = request_.ignored;
  if (!failed_.ok()) line["error"] = failed_.message();
  service_.log().remember(line);
  if (!body_.empty()) line["body"] = body_;
  service_.log().line(line);
}

}  // namespace pagedkv::server
