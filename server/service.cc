#include "server/service.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "pagedkv/format.h"
#include "server/completion_job.h"
#include "server/metrics.h"
#include "server/page.h"
#include "server/stats_json.h"

namespace pagedkv::server {
namespace {

constexpr size_t kMaxTokenizeIds = 1 << 20;
constexpr size_t kShownPath = 200;
constexpr char kModel[] = "/v1/models/";

HttpReply json_reply(const OrderedJson& json) { return {.body = dump(json)}; }

// A name that was given twice is one.
ServerOptions named_once(ServerOptions options) {
  std::vector<std::string> names;
  for (std::string& name : options.model_names)
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(std::move(name));
  options.model_names = std::move(names);
  return options;
}

}  // namespace

const Service::Route Service::kRoutes[] = {
    {"POST", "/v1/chat/completions", &Service::chat},
    {"POST", "/v1/completions", &Service::completions},
    {"GET", "/v1/models", &Service::models},
    {"GET", kModel, &Service::model},
    {"POST", "/tokenize", &Service::tokenize},
    {"POST", "/detokenize", &Service::detokenize},
    {"GET", "/health", &Service::health, true},
    {"GET", "/metrics", &Service::metrics},
    {"GET", "/stats", &Service::stats},
    {"GET", "/", &Service::page, true},
};

Service::Service(const ServerOptions& options)
    : options_(named_once(options)),
      access_({.host = options.http.host,
               .allowed_hosts = options.allowed_hosts,
               .api_keys = options.api_keys,
               .cors_origin = options.cors_origin}),
      created_(unix_seconds()),
      log_(options.log, options.log_json) {}

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
const Service::Route* Service::route_of(std::string_view path) {
  for (const Route& route : kRoutes) {
    const std::string_view known = route.path;
    const bool is_prefix = known.size() > 1 && known.ends_with('/');
    if (is_prefix ? path.starts_with(known) : path == known) return &route;
  }
  return nullptr;
}

void Service::handle(const std::shared_ptr<Exchange>& exchange) {
  const HttpRequest& request = exchange->request();
  if (const auto error = access_.check_host(request)) return refuse(exchange, *error);
  if (auto answer = access_.preflight(request)) return reply(exchange, *std::move(answer));
  if (const auto error = access_.check_page(request)) return refuse(exchange, *error);
  const std::string asked = request.method.substr(0, 40) + " " + request.path.substr(0, kShownPath);
  const Route* route = route_of(request.path);
  if (!route) {
    std::string paths;
    for (const Route& one : kRoutes) paths += std::string(paths.empty() ? "" : ", ") + one.path;
    return refuse(
        exchange,
        {.status = 404, .message = asked + " is not served here; there is: " + paths, .code = "not_found"});
  }
  const bool get = std::string_view(route->method) == "GET";
  if (request.method != route->method && !(get && request.method == "HEAD")) {
    const std::string allowed = get ? "GET, HEAD" : route->method;
    HttpReply no = error_reply({.status = 405, .message = asked + " is not allowed, but " + allowed});
    no.headers.emplace_back("Allow", allowed);
    return reply(exchange, std::move(no));
  }
  if (const auto error = access_.check_key(request); error && !route->open) return refuse(exchange, *error);
  (this->*route->handler)(exchange);
}

void Service::reply(const std::shared_ptr<Exchange>& exchange, HttpReply reply) {
  const HttpRequest& request = exchange->request();
  access_.allow_origin(reply);
  count_reply(request.path, reply.status);
  if (reply.status >= 400) log_refusal(reply, request.path, request.method);
  exchange->reply(std::move(reply));
}

void Service::note_refusal(HttpReply& refusal) {
  access_.allow_origin(refusal);
  log_.count_reply("other", refusal.status);
  log_refusal(refusal, "", "");
}

void Service::log_refusal(const HttpReply& reply, const std::string& path, const std::string& method) {
  OrderedJson line = {{"status", reply.status}};
  if (!path.empty()) line["path"] = path.substr(0, kShownPath);
  if (!method.empty()) line["method"] = method.substr(0, 40);
  if (!reply.reason.empty()) line["error"] = options_.log_prompts ? reply.reason : without_texts(reply.reason);
  log_.line(line);
}

void Service::begin(const std::shared_ptr<Exchange>& exchange, HttpReply head) {
  access_.allow_origin(head);
  count_reply(exchange->request().path, head.status);
  exchange->begin(std::move(head));
}

void Service::refuse(const std::shared_ptr<Exchange>& exchange, const ApiError& error) {
  reply(exchange, error_reply(error));
}

void Service::reply(const std::shared_ptr<Exchange>& exchange, const ApiResult<HttpReply>& result) {
  reply(exchange, result.ok() ? *result : error_reply(result.error()));
}

void Service::count_reply(const std::string& path, int status) {
  const Route* route = route_of(path);
  log_.count_reply(route && path == route->path ? path : "other", status);
}

std::optional<ApiError> Service::not_ready() const {
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
  return std::nullopt;
}

// --- the endpoints -----------------------------------------------------------------------------------------------
void Service::complete(const std::shared_ptr<Exchange>& exchange, Endpoint endpoint) {
  if (const auto error = not_ready()) return refuse(exchange, *error);
  std::string body = exchange->take_body();
  auto request = read_completion(endpoint, body, text(), limits_, [&] { return exchange->gone(); });
  if (!options_.log_prompts) body.clear();
  if (!request.ok()) return refuse(exchange, request.error());
  char id[48];
  std::snprintf(id, sizeof id, "%s-%08llx%08llx", endpoint == Endpoint::kChat ? "chatcmpl" : "cmpl",
                static_cast<unsigned long long>(created_), static_cast<unsigned long long>(++last_id_));
  std::make_shared<CompletionJob>(*this, exchange, *std::move(request), id, std::move(body))->start();
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

void Service::model(const std::shared_ptr<Exchange>& exchange) {
  const std::string name = exchange->request().path.substr(std::string_view(kModel).size());
  const auto& names = options_.model_names;
  if (std::find(names.begin(), names.end(), name) == names.end()) {
    return refuse(exchange, {.status = 404,
                             .message = "model \"" + name.substr(0, 200) + "\" is not served here",
                             .param = "model",
                             .code = "model_not_found"});
  }
  reply(exchange, json_reply({{"id", name}, {"object", "model"}, {"created", created_}, {"owned_by", "pagedkv"}}));
}

void Service::tokenize(const std::shared_ptr<Exchange>& exchange) {
  reply(exchange, tokenized(exchange->request().body));
}

ApiResult<HttpReply> Service::tokenized(const std::string& body) const {
  if (const auto error = not_ready()) return *error;
  const auto json = parse_object(body);
  if (!json.ok()) return json.error();
  const char* field = json->contains("prompt") ? "prompt" : "content";
  if (!json->contains(field) || !(*json)[field].is_string())
    return ApiError{.message = "prompt (or content) is missing or no string", .param = field};
  for (const char* flag : {"add_special_tokens", "add_special", "parse_special"}) {
    if (json->contains(flag) && !(*json)[flag].is_boolean())
      return ApiError{.message = std::string(flag) + " is true or false", .param = flag};
  }
  const bool add_special = json->value("add_special_tokens", json->value("add_special", true));
  auto tokens = text().tokenize((*json)[field].get<std::string>(), add_special, json->value("parse_special", true));
  if (!tokens.ok()) return api_error(tokens.status(), field);
  return json_reply({{"tokens", *tokens}, {"count", tokens->size()}, {"max_model_len", limits_.context.n}});
}

void Service::detokenize(const std::shared_ptr<Exchange>& exchange) {
  reply(exchange, detokenized(exchange->request().body));
}

ApiResult<HttpReply> Service::detokenized(const std::string& body) const {
  if (const auto error = not_ready()) return *error;
  const auto json = parse_object(body);
  if (!json.ok()) return json.error();
  const auto list = json->find("tokens");
  if (list == json->end() || !list->is_array() || list->size() > kMaxTokenizeIds)
    return ApiError{.message = "tokens is missing or no list of at most 1048576 ids", .param = "tokens"};
  const auto tokens = token_ids(*list, text().vocab_size(), "tokens");
  if (!tokens.ok()) return tokens.error();
  engine::TextStream whole;  // bytes that are no characters become U+FFFD
  std::string shown = whole.push(text().spell(*tokens));
  shown += whole.finish();
  return json_reply({{"prompt", shown}, {"content", shown}});
}

void Service::health(const std::shared_ptr<Exchange>& exchange) {
  auto error = not_ready();
  if (!error) {
    const double age = scheduler_->stats().seconds_in_step;
    if (age <= options_.stall_seconds) return reply(exchange, json_reply({{"status", "ok"}}));
    error = ApiError{.message = "one step has been running for " + std::to_string(int64_t(age)) + " seconds",
                     .code = "stalled"};
  }
  OrderedJson json = {{"status", error->code}, {"reason", error->message}};
  if (error->code == "loading") json["progress"] = progress_.load();
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
  in.ready = !not_ready();
  if (options_.lost_log_lines) in.lost_log_lines = options_.lost_log_lines();
  in.replies = log_.replies();
  reply(exchange, {.content_type = "text/plain; version=0.0.4; charset=utf-8", .body = metrics_text(in)});
}

void Service::stats(const std::shared_ptr<Exchange>& exchange) {
  if (const auto error = not_ready(); error && !ready_) return refuse(exchange, *error);
  const auto& query = exchange->request().query;
  const bool with_blocks =
      std::find(query.begin(), query.end(), std::pair{std::string("blocks"), std::string("1")}) != query.end();
  OrderedJson out = stats_json({.model = options_.model_names.front(),
                                .kv_quant = kv_quant_,
                                .isa = isa_,
                                .context = limits_.context,
                                .block_size = model_->cache().options().block_size,
                                .options = options_.scheduler,
                                .scheduler = scheduler_->stats(with_blocks),
                                .http = http_->figures(),
                                .with_blocks = with_blocks});
  if (options_.lost_log_lines) out["log_lines_lost"] = options_.lost_log_lines();
  out["recent"] = log_.recent();
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
