#include "server/service.h"

#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>
#include <random>
#include <utility>

#include "pagedkv/format.h"
#include "server/completion_reply.h"
#include "server/metrics.h"
#include "server/page.h"

namespace pagedkv::server {
namespace {

constexpr size_t kRecent = 64;
constexpr size_t kMaxTokenizeIds = 1 << 20;
constexpr int64_t kMaxDrawnBlocks = 8192;  // of the pool's map on the page

int64_t unix_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// Equal or not, in a time that tells nothing but the length of what the client sent.
bool equal_in_constant_time(std::string_view secret, std::string_view given) {
  unsigned difference = secret.size() != given.size();
  for (size_t i = 0; i < given.size(); ++i)
    difference |= static_cast<unsigned char>(given[i]) ^ static_cast<unsigned char>(secret[i % secret.size()]);
  return difference == 0;
}

// What is allocated and not freed: unlike resident memory it does not depend on what the allocator keeps for later.
std::optional<int64_t> heap_live_bytes() {
#ifdef __GLIBC__
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
#else
  return std::nullopt;
#endif
}

HttpReply json_reply(const OrderedJson& json) { return {.body = dump(json)}; }

}  // namespace

// One request of a completion endpoint, from its body to its last byte. The I/O thread's, but for the sinks' calls,
// which only hand over to it.
class CompletionJob : public std::enable_shared_from_this<CompletionJob> {
 public:
  // body: to be logged, or empty.
  CompletionJob(Service& service, std::shared_ptr<Exchange> exchange, CompletionRequest request, std::string id,
                std::string body)
      : service_(service),
        exchange_(std::move(exchange)),
        request_(std::move(request)),
        id_(std::move(id)),
        body_(std::move(body)),
        n_(request_.prompts.front().n),
        reply_(request_.endpoint, id_, request_.model, unix_seconds(), n_ * std::ssize(request_.prompts),
               request_.logprobs, request_.include_usage, service.model_->text()) {}

  // Any thread, once.
  void start() {
    left_ = std::ssize(request_.prompts);
    for (size_t i = 0; i < request_.prompts.size(); ++i) {
      auto id = service_.scheduler_->submit(
          std::move(request_.prompts[i]), std::make_shared<Sink>(shared_from_this(), static_cast<int64_t>(i) * n_));
      if (!id.ok()) {
        // The others are not wanted without it.
        for (const engine::RequestId other : ids_) service_.scheduler_->cancel(other);
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
      for (const engine::RequestId id : self->ids_) self->service_.scheduler_->cancel(id);
    });
    if (request_.stream) exchange_->defer([self = shared_from_this()] { self->begin(); });
  }

 private:
  // Hands what the scheduler says to the I/O thread.
  class Sink : public engine::RequestSink {
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

  std::vector<std::pair<std::string, std::string>> headers() const {
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
  void begin() {
    if (begun_ || over_) return;
    begun_ = true;
    auto all = headers();
    all.emplace_back("Cache-Control", "no-cache");
    service_.count_reply(exchange_->request().path, 200);
    HttpReply head{.content_type = "text/event-stream", .body = "", .headers = std::move(all)};
    service_.allow_origin(head);
    exchange_->begin(std::move(head));
  }

  void add(const engine::Delta& delta) {
    if (over_) return;
    if (delta.finish) finishes_ += (finishes_.empty() ? "" : ",") + std::string(finish_reason_name(*delta.finish));
    if (!request_.stream) {
      reply_.add(delta);
      return;
    }
    begin();
    exchange_->send(reply_.events(delta));
  }

  void end(const Status& status, const engine::Usage& usage) {
    usage_.prompt_tokens += usage.prompt_tokens;
    usage_.cached_tokens += usage.cached_tokens;
    usage_.completion_tokens += usage.completion_tokens;
    usage_.preemptions += usage.preemptions;
    usage_.reason = usage.reason;
    usage_.queue_seconds = std::max(usage_.queue_seconds, usage.queue_seconds);
    usage_.first_token_seconds = std::max(usage_.first_token_seconds, usage.first_token_seconds);
    usage_.total_seconds = std::max(usage_.total_seconds, usage.total_seconds);
    if (!status.ok() && failed_.ok()) failed_ = status;
    if (--left_ > 0 || over_) return;
    if (failed_.ok() && request_.stream) begin();  // an answer without text has not begun
    over_ = true;
    int code = 200;
    if (!failed_.ok()) {
      const ApiError error = api_error(failed_);
      code = error.status;
      if (request_.stream && begun_) {
        exchange_->send(CompletionReply::error_events(error));
        exchange_->finish();
      } else {
        service_.reply(exchange_, error_reply(error));
      }
    } else if (request_.stream) {
      exchange_->send(reply_.last_events(usage_));
      exchange_->finish();
    } else {
      service_.reply(exchange_, {.body = reply_.whole(usage_), .headers = headers()});
    }
    OrderedJson line = {{"id", id_},
                        {"path", exchange_->request().path},
                        {"status", code},
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
    service_.remember(line);
    if (!body_.empty()) line["body"] = body_;
    service_.log(line);
  }
  static double rounded(double seconds) { return static_cast<double>(std::llround(seconds * 1e4)) / 1e4; }

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

const Service::Route Service::kRoutes[] = {
    {"POST", "/v1/chat/completions", &Service::chat},
    {"POST", "/v1/completions", &Service::completions},
    {"GET", "/v1/models", &Service::models},
    {"POST", "/tokenize", &Service::tokenize},
    {"POST", "/detokenize", &Service::detokenize},
    {"GET", "/health", &Service::health, true},
    {"GET", "/metrics", &Service::metrics},
    {"GET", "/stats", &Service::stats},
    {"GET", "/", &Service::page, true},
};

Service::Service(const ServerOptions& options) : options_(options), created_(unix_seconds()) {}

void Service::open(engine::StepModel& model, engine::Scheduler& scheduler, const HttpServer& http) {
  model_ = &model;
  scheduler_ = &scheduler;
  http_ = &http;
  limits_ = {.models = options_.model_names,
             .sampling = options_.sampling,
             .max_tokens = options_.max_tokens,
             .context = model.context(),
             .max_choices = scheduler.max_choices()};
  isa_ = std::string(model.cache().isa());
  kv_quant_ = kv_quant_name(model.cache().options().groups.front().shape.formats);
  ready_.store(true);
}

void Service::fail(const Status& why) {
  const std::lock_guard lock(mutex_);
  failed_ = why;
}

void Service::drain() { draining_.store(true); }

// --- around every request ----------------------------------------------------------------------------------------
void Service::handle(const std::shared_ptr<Exchange>& exchange) {
  const HttpRequest& request = exchange->request();
  if (!options_.cors_origin.empty() && request.method == "OPTIONS") {
    reply(exchange, {.status = 204,
                     .headers = {{"Access-Control-Allow-Methods", "GET, POST, OPTIONS"},
                                 {"Access-Control-Allow-Headers", "Authorization, Content-Type"},
                                 {"Access-Control-Max-Age", "600"}}});
    return;
  }
  if (is_foreign_page(request)) {
    reply(exchange, error_reply({.status = 403,
                                 .message = "pages of another origin may not call this server (--cors-origin)",
                                 .type = "permission_error"}));
    return;
  }
  const bool head = request.method == "HEAD";
  bool known = false;
  for (const Route& route : kRoutes) {
    if (request.path != route.path) continue;
    known = true;
    if (request.method != route.method && !(head && std::string_view(route.method) == "GET")) continue;
    if (!route.open && !has_key(request)) return refuse_key(exchange);
    (this->*route.handler)(exchange);
    return;
  }
  if (request.path.starts_with("/v1/models/") && request.method == "GET") {
    if (!has_key(request)) return refuse_key(exchange);
    model(exchange, request.path.substr(std::string_view("/v1/models/").size()));
    return;
  }
  if (known) {
    reply(exchange,
          error_reply({.status = 405, .message = request.method + " is not allowed for " + request.path}));
    return;
  }
  std::string paths;
  for (const Route& route : kRoutes) paths += std::string(paths.empty() ? "" : ", ") + route.path;
  reply(exchange, error_reply({.status = 404,
                               .message = request.method + " " + request.path.substr(0, 200) +
                                          " is not served here; there is: " + paths,
                               .code = "not_found"}));
}

void Service::refuse_key(const std::shared_ptr<Exchange>& exchange) {
  reply(exchange, error_reply({.status = 401,
                               .message = "a valid API key is needed: Authorization: Bearer KEY",
                               .type = "authentication_error",
                               .code = "invalid_api_key"}));
}

void Service::allow_origin(HttpReply& reply) const {
  if (options_.cors_origin.empty()) return;
  reply.headers.emplace_back("Access-Control-Allow-Origin", options_.cors_origin);
  if (options_.cors_origin != "*") reply.headers.emplace_back("Vary", "Origin");
}

void Service::reply(const std::shared_ptr<Exchange>& exchange, HttpReply reply) {
  const HttpRequest& request = exchange->request();
  allow_origin(reply);
  count_reply(request.path, reply.status);
  if (reply.status >= 400)
    log({{"path", request.path.substr(0, 200)}, {"method", request.method}, {"status", reply.status}});
  exchange->reply(std::move(reply));
}

bool Service::has_key(const HttpRequest& request) const {
  if (options_.api_keys.empty()) return true;
  std::string_view given = request.header("authorization");
  if (!given.starts_with("Bearer ")) return false;
  given.remove_prefix(7);
  bool found = false;
  for (const std::string& key : options_.api_keys) found |= equal_in_constant_time(key, given);
  return found;
}

// Browsers tell whose page is calling. Others than browsers have no Origin.
bool Service::is_foreign_page(const HttpRequest& request) const {
  const std::string_view origin = request.header("origin");
  if (origin.empty() || options_.cors_origin == "*" || origin == options_.cors_origin) return false;
  const size_t host = origin.find("://");
  return host == std::string_view::npos || origin.substr(host + 3) != request.header("host");
}

void Service::count_reply(const std::string& path, int status) {
  bool known = false;
  for (const Route& route : kRoutes) known |= path == route.path;
  const std::lock_guard lock(mutex_);
  ++replies_[{known ? path : "other", status}];
}

void Service::log(const OrderedJson& fields) const {
  if (!options_.log) return;
  OrderedJson line = {{"time", unix_seconds()}};
  line.update(fields);
  if (options_.log_json) {
    options_.log(dump(line));
    return;
  }
  std::string text;
  for (const auto& [name, value] : line.items()) {
    if (name == "time") continue;
    std::string word = value.is_string() ? value.get<std::string>() : dump(value);
    const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
      return c > 0x20 && c != '"' && c != '=' && c < 0x7f;
    });
    if (!plain) word = dump(OrderedJson(word));
    text += (text.empty() ? "" : " ") + name + "=" + word;
  }
  options_.log(text);
}

void Service::remember(OrderedJson request) {
  const std::lock_guard lock(mutex_);
  recent_.push_front(std::move(request));
  if (recent_.size() > kRecent) recent_.pop_back();
}

ApiError Service::not_ready() const {
  ApiError error{.status = 503, .type = "service_unavailable_error"};
  if (draining_) {
    error.message = "the server is being stopped";
    error.code = "stopping";
    return error;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!failed_.ok()) {
      error.message = "the model could not be loaded: " + failed_.message();
      error.code = "failed";
      return error;
    }
  }
  if (!ready_) {
    char percent[16];
    std::snprintf(percent, sizeof percent, "%.0f %%", progress_.load() * 100);
    error.message = std::string("the model is being loaded: ") + percent;
    error.code = "loading";
    return error;
  }
  if (const Status dead = scheduler_->health(); !dead.ok()) {
    error.message = "the engine has ended: " + dead.message();
    error.code = "engine_ended";
    return error;
  }
  error.status = 0;
  return error;
}

// --- the endpoints -----------------------------------------------------------------------------------------------
void Service::complete(const std::shared_ptr<Exchange>& exchange, Endpoint endpoint) {
  if (const ApiError error = not_ready(); error.status != 0) return reply(exchange, error_reply(error));
  std::string body = exchange->take_body();
  auto read = read_completion(endpoint, body, model_->text(), limits_);
  if (!options_.log_prompts) body.clear();
  if (const auto* error = std::get_if<ApiError>(&read)) return reply(exchange, error_reply(*error));
  char id[48];
  std::snprintf(id, sizeof id, "%s-%08llx%08llx", endpoint == Endpoint::kChat ? "chatcmpl" : "cmpl",
                static_cast<unsigned long long>(created_), static_cast<unsigned long long>(++last_id_));
  std::make_shared<CompletionJob>(*this, exchange, std::get<CompletionRequest>(std::move(read)), id,
                                  std::move(body))
      ->start();
}

void Service::models(const std::shared_ptr<Exchange>& exchange) {
  OrderedJson list = OrderedJson::array();
  for (const std::string& name : options_.model_names) {
    OrderedJson one = {{"id", name}, {"object", "model"}, {"created", created_}, {"owned_by", "pagedkv"}};
    if (ready_) one["max_model_len"] = limits_.context.n;
    list.push_back(std::move(one));
  }
  reply(exchange, json_reply({{"object", "list"}, {"data", std::move(list)}}));
}

void Service::model(const std::shared_ptr<Exchange>& exchange, const std::string& name) {
  const auto& names = options_.model_names;
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    return reply(exchange, error_reply({.status = 404,
                                        .message = "model \"" + name.substr(0, 200) + "\" is not served here",
                                        .param = "model",
                                        .code = "model_not_found"}));
  }
  reply(exchange, json_reply({{"id", name}, {"object", "model"}, {"created", created_}, {"owned_by", "pagedkv"}}));
}

void Service::tokenize(const std::shared_ptr<Exchange>& exchange) {
  if (const ApiError error = not_ready(); error.status != 0) return reply(exchange, error_reply(error));
  auto body = parse_object(exchange->request().body);
  if (const auto* error = std::get_if<ApiError>(&body)) return reply(exchange, error_reply(*error));
  const Json& json = std::get<Json>(body);
  const char* field = json.contains("prompt") ? "prompt" : "content";
  if (!json.contains(field) || !json[field].is_string())
    return reply(exchange, error_reply({.message = "prompt (or content) is missing or no string", .param = field}));
  for (const char* flag : {"add_special_tokens", "add_special", "parse_special"}) {
    if (json.contains(flag) && !json[flag].is_boolean())
      return reply(exchange, error_reply({.message = std::string(flag) + " is true or false", .param = flag}));
  }
  const bool add_special = json.value("add_special_tokens", json.value("add_special", true));
  auto tokens =
      model_->text().tokenize(json[field].get<std::string>(), add_special, json.value("parse_special", true));
  if (!tokens.ok()) return reply(exchange, error_reply(api_error(tokens.status(), field)));
  reply(exchange,
        json_reply({{"tokens", *tokens}, {"count", tokens->size()}, {"max_model_len", limits_.context.n}}));
}

void Service::detokenize(const std::shared_ptr<Exchange>& exchange) {
  if (const ApiError error = not_ready(); error.status != 0) return reply(exchange, error_reply(error));
  auto body = parse_object(exchange->request().body);
  if (const auto* error = std::get_if<ApiError>(&body)) return reply(exchange, error_reply(*error));
  const Json& json = std::get<Json>(body);
  if (!json.contains("tokens") || !json["tokens"].is_array() || json["tokens"].size() > kMaxTokenizeIds)
    return reply(exchange, error_reply({.message = "tokens is missing or no list of at most 1048576 ids",
                                        .param = "tokens"}));
  std::vector<int32_t> tokens;
  for (const Json& token : json["tokens"]) {
    if (!token.is_number_integer() || token < 0 || token >= model_->text().vocab_size()) {
      return reply(exchange, error_reply({.message = "tokens has " + token.dump().substr(0, 80) +
                                                     ", expected are ids from 0 to " +
                                                     std::to_string(model_->text().vocab_size() - 1),
                                          .param = "tokens"}));
    }
    tokens.push_back(token.get<int32_t>());
  }
  engine::TextStream whole;  // bytes that are no characters become U+FFFD
  std::string shown = whole.push(model_->text().spell(tokens));
  shown += whole.finish();
  reply(exchange, json_reply({{"prompt", shown}, {"content", shown}}));
}

void Service::health(const std::shared_ptr<Exchange>& exchange) {
  ApiError error = not_ready();
  if (error.status == 0) {
    const double age = scheduler_->stats().seconds_in_step;
    if (age <= options_.stall_seconds) return reply(exchange, json_reply({{"status", "ok"}}));
    error.status = 503;
    error.code = "stalled";
    error.message = "one step has been running for " + std::to_string(static_cast<int64_t>(age)) + " seconds";
  }
  OrderedJson json = {{"status", error.code}, {"reason", error.message}};
  if (error.code == "loading") json["progress"] = progress_.load();
  reply(exchange, {.status = 503, .body = dump(json), .headers = {{"Retry-After", "1"}}});
}

void Service::metrics(const std::shared_ptr<Exchange>& exchange) {
  MetricsInput in{.version = options_.version, .model = options_.model_names.front()};
  in.loaded = ready_;
  if (in.loaded) {
    in.isa = isa_;
    in.kv_quant = kv_quant_;
    in.scheduler = scheduler_->stats();
    in.http = http_->figures();
  }
  in.ready = not_ready().status == 0;
  if (options_.lost_log_lines) in.lost_log_lines = options_.lost_log_lines();
  {
    const std::lock_guard lock(mutex_);
    in.replies = replies_;
  }
  reply(exchange, {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics_text(in)});
}

void Service::stats(const std::shared_ptr<Exchange>& exchange) {
  if (!ready_) return reply(exchange, error_reply(not_ready()));
  const std::string& query = exchange->request().query;
  const bool with_blocks = query == "blocks=1" || query.starts_with("blocks=1&");
  const engine::SchedulerStats s = scheduler_->stats(with_blocks);
  const HttpFigures http = http_->figures();
  OrderedJson out = {
      {"model", options_.model_names.front()},
      {"context", limits_.context.n},
      {"block_size", model_->cache().options().block_size.n},
      {"kv_quant", kv_quant_},
      {"isa", isa_},
      {"cache", OrderedJson::parse(to_json(s.cache))},
      {"scheduler",
       {{"max_num_seqs", options_.scheduler.max_num_seqs}, {"max_queue", options_.scheduler.max_queue}}},
      {"http",
       {{"connections", http.connections},
        {"bad_requests", http.bad_requests},
        {"gone", http.gone},
        {"slow_readers", http.slow_readers}}}};
  for (const auto& [name, value] : engine::named_counts(s)) out["scheduler"][name] = value;
  for (const auto& [name, value] : engine::named_seconds(s)) out["scheduler"][name] = value;
  if (options_.lost_log_lines) out["log_lines_lost"] = options_.lost_log_lines();
  if (const auto live = heap_live_bytes()) out["heap_live_bytes"] = *live;
  {
    const std::lock_guard lock(mutex_);
    out["recent"] = recent_;
  }
  if (with_blocks) {
    // Parallel lists, short for the wire: state by letter (- free o open f full s shared c cached . no memory).
    std::string states;
    OrderedJson holders = OrderedJson::array(), ages = holders, sequences = holders, keys = holders;
    const auto n = std::min<int64_t>(std::ssize(s.blocks.blocks), kMaxDrawnBlocks);
    for (int64_t i = 0; i < n; ++i) {
      const BlockView& b = s.blocks.blocks[static_cast<size_t>(i)];
      states += ".-ofsc"[static_cast<int>(b.state)];
      holders.push_back(b.holders);
      ages.push_back(s.blocks.step - b.last_step);
      sequences.push_back(b.sequence);
      char key[20] = "";
      if (b.key != 0) std::snprintf(key, sizeof key, "%016llx", static_cast<unsigned long long>(b.key));
      keys.push_back(key);
    }
    out["blocks"] = {{"total", s.blocks.blocks.size()},   {"states", states},
                     {"holders", std::move(holders)},     {"ages", std::move(ages)},
                     {"sequences", std::move(sequences)}, {"keys", std::move(keys)}};
  }
  reply(exchange, json_reply(out));
}

void Service::page(const std::shared_ptr<Exchange>& exchange) {
  reply(exchange, {.content_type = "text/html; charset=utf-8",
                   .body = std::string(kPage),
                   .headers = {{"Cache-Control", "no-cache"},
                               {"Content-Security-Policy",
                                "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                "connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"}}});
}

}  // namespace pagedkv::server
