#include "server/http.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/signal_set.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <cctype>
#include <chrono>
#include <mutex>
#include <optional>
#include <sstream>
#include <unordered_set>

#include "pagedkv/log.h"
#include "server/api_error.h"
#include "server/target.h"

namespace pagedkv::server {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::use_awaitable;
using asio::ip::tcp;
using boost::system::error_code;
using namespace asio::experimental::awaitable_operators;  // NOLINT: `a || b` on awaitables

constexpr int kWorkers = 2;  // threads that parse and tokenize bodies of usual length
constexpr size_t kLongBody = 64 << 10;
constexpr auto kPeekAgain = std::chrono::milliseconds(50);

// Errors as values: what a client does is no exception.
constexpr auto kTuple = asio::as_tuple(use_awaitable);

std::chrono::steady_clock::duration duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
}

std::string lower(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::tolower(c); });
  return out;
}

HttpReply refusal(int status, const std::string& message) {
  return error_reply({.status = status, .message = message});
}

// What is wrong with a header, before its body is read.
std::optional<HttpReply> check_head(const http::request<http::string_body>& head) {
  const auto hosts = head.count(http::field::host);
  if (hosts > 1 || (hosts == 0 && head.version() >= 11))
    return refusal(400, "a request has one header Host; this one has " + std::to_string(hosts));
  if (hosts == 1 && head.version() >= 11 && head[http::field::host].empty())
    return refusal(400, "the header Host is empty");
  const bool plain =
      !head.count(http::field::content_encoding) || beast::iequals(head[http::field::content_encoding], "identity");
  const bool known = !head.count(http::field::transfer_encoding) ||
                     beast::iequals(head[http::field::transfer_encoding], "chunked");
  if (!plain || !known) return refusal(415, "bodies that are compressed are not read here");
  return std::nullopt;
}

// The answer to a request that could not be read to its end; none where nobody is there to get it, or nothing of it
// was understood. `malformed` says what is wrong with one that is not HTTP.
std::optional<HttpReply> refusal_of(const error_code& error, const HttpOptions& options, const char* malformed) {
  static const error_code any_of_http = http::make_error_code(http::error::bad_method);
  if (error == http::error::header_limit)
    return refusal(431, "the header is longer than " + std::to_string(options.max_header_bytes) + " bytes");
  if (error == http::error::body_limit)
    return refusal(413, "the body is longer than " + std::to_string(options.max_body_bytes) + " bytes");
  if (error.category() == any_of_http.category() && error != http::error::end_of_stream &&
      error != http::error::partial_message)
    return refusal(400, malformed);
  return std::nullopt;
}

struct Counters {
  std::atomic<int64_t> connections{0}, accepted{0}, refused{0}, bad{0}, gone{0}, slow{0};
};

// How a request wants to be answered.
struct Manner {
  int version = 11;
  bool keep_alive = false;
  bool head_only = false;
};

http::response<http::empty_body> head_of(const HttpReply& reply, const Manner& manner) {
  http::response<http::empty_body> head(static_cast<http::status>(reply.status), 11);
  head.set(http::field::content_type, reply.content_type);
  for (const auto& [name, value] : reply.headers) head.insert(name, value);
  head.set(http::field::connection, manner.keep_alive ? "keep-alive" : "close");
  return head;
}

std::string written(const http::response<http::empty_body>& head) {
  std::ostringstream text;
  text << head.base();
  return text.str();
}

// An answer that is there at once.
std::string whole(const HttpReply& reply, const Manner& manner) {
  auto head = head_of(reply, manner);
  if (reply.status != 204) head.content_length(reply.body.size());
  return written(head) + (manner.head_only ? "" : reply.body);
}

// What an answer hands to its connection. Lives as long as either of the two.
class ExchangeImpl final : public Exchange, public std::enable_shared_from_this<ExchangeImpl> {
 public:
  ExchangeImpl(asio::io_context& io, HttpRequest request, int64_t send_buffer, Manner manner)
      : io_(io),
        request_(std::move(request)),
        send_buffer_(send_buffer),
        manner_(manner),
        keep_alive_(manner.keep_alive),
        wake_(io, asio::steady_timer::time_point::max()) {}

  const HttpRequest& request() const override { return request_; }
  std::string take_body() override { return std::move(request_.body); }

  void reply(HttpReply reply) override { push(whole(reply, manner_), true); }
  void begin(HttpReply first) override {
    auto head = head_of(first, manner_);
    if (is_chunked()) head.chunked(true);
    push(written(head) + (first.body.empty() ? "" : chunk(first.body)), false);
    asio::post(io_, [self = shared_from_this()] { self->begun_ = true; });
  }
  void send(std::string piece) override {
    if (!piece.empty()) push(chunk(piece), false);
  }
  void finish() override { push(is_chunked() ? beast::buffers_to_string(http::make_chunk_last()) : "", true); }
  void abandon() override {
    asio::post(io_, [self = shared_from_this()] { self->keep_alive_ = false; });
    finish();
  }
  void defer(std::function<void()> work) override { asio::post(io_, std::move(work)); }
  bool gone() const override { return gone_; }
  void on_gone(std::function<void()> gone) override {
    asio::post(io_, [self = shared_from_this(), gone = std::move(gone)]() mutable {
      if (self->gone_) {
        gone();
      } else if (!self->complete_) {
        self->on_gone_ = std::move(gone);
      }
    });
  }

  // --- the I/O thread --------------------------------------------------------------------------------------------
  bool keep_alive() const { return keep_alive_; }
  bool complete() const { return complete_ && outbox_.empty(); }
  bool has_output() const { return !outbox_.empty(); }
  bool overflowed() const { return overflowed_; }
  // Bytes that change nothing for a client that is there; one that left answers them with a reset. Empty: there are
  // none.
  std::string probe() const {
    if (manner_.version < 11) return "";
    return begun_ ? chunk(":\n\n") : "HTTP/1.1 100 Continue\r\n\r\n";
  }
  // What to do when output piles up.
  void set_cut_off(std::function<void()> cut_off) { cut_off_ = std::move(cut_off); }
  std::string take_output() {
    std::string out;
    out.swap(outbox_);
    return out;
  }
  // Waits until there is output or the answer is complete.
  asio::awaitable<void> output() {
    while (outbox_.empty() && !complete_ && !overflowed_) {
      wake_.expires_at(asio::steady_timer::time_point::max());
      co_await wake_.async_wait(kTuple);
    }
  }
  void client_is_gone() {
    gone_ = true;
    outbox_.clear();
    if (auto call = std::exchange(on_gone_, nullptr)) call();
  }

 private:
  // HTTP/1.0 knows no chunks: the end of the connection ends the answer.
  bool is_chunked() const { return manner_.version >= 11; }
  std::string chunk(const std::string& piece) const {
    return is_chunked() ? beast::buffers_to_string(http::make_chunk(asio::buffer(piece))) : piece;
  }
  void push(std::string text, bool last) {
    asio::post(io_, [self = shared_from_this(), text = std::move(text), last] {
      if (self->gone_ || self->complete_ || self->overflowed_) return;
      self->outbox_ += text;
      self->complete_ = last;
      if (last) self->on_gone_ = nullptr;
      // A whole answer of any size is let through: it is there already. Pieces must not pile up.
      self->overflowed_ = !last && std::ssize(self->outbox_) > self->send_buffer_;
      if (self->overflowed_) {
        self->outbox_.clear();
        self->cut_off_();  // also a write that waits for the client
      }
      self->wake_.cancel();
    });
  }

  asio::io_context& io_;
  HttpRequest request_;
  const int64_t send_buffer_;
  const Manner manner_;
  bool keep_alive_;
  asio::steady_timer wake_;
  std::string outbox_;
  bool begun_ = false, complete_ = false, overflowed_ = false;
  std::atomic<bool> gone_{false};
  std::function<void()> on_gone_;
  std::function<void()> cut_off_ = [] {};
};

class ServerImpl;

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(ServerImpl& server, tcp::socket socket) : server_(server), stream_(std::move(socket)) {}
  asio::awaitable<void> serve();
  void close() {
    error_code ignored;
    stream_.socket().close(ignored);  // NOLINT: closing twice is fine
  }

 private:
  struct Received {
    std::optional<HttpRequest> request;
    Manner manner;
    std::optional<HttpReply> refusal;  // the connection is closed after it
  };
  asio::awaitable<bool> skip_blank_lines();
  asio::awaitable<Received> receive();
  asio::awaitable<void> refuse(HttpReply refusal);
  asio::awaitable<bool> send(std::string text);
  asio::awaitable<void> until_gone(const ExchangeImpl& exchange);
  asio::awaitable<bool> answer(std::shared_ptr<ExchangeImpl> exchange);

  ServerImpl& server_;
  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  bool half_closed_ = false;  // the client sends no more
};

class ServerImpl final : public HttpServer {
 public:
  ServerImpl(const HttpOptions& options, Handler handler, RefusalHook on_refusal)
      : options_(options),
        handler_(std::move(handler)),
        on_refusal_(std::move(on_refusal)),
        io_(1),
        acceptor_(io_) {}
  ~ServerImpl() override { join_workers(); }

  Status bind() {
    error_code error;
    const auto address = asio::ip::make_address(options_.host == "localhost" ? "127.0.0.1" : options_.host, error);
    if (error) return invalid_argument("[http] host \"" + options_.host + "\" is no IP address");
    const tcp::endpoint endpoint(address, uint16_t(options_.port));
    acceptor_.open(endpoint.protocol(), error);
    if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor_.bind(endpoint, error);
    if (!error) acceptor_.listen(4096, error);
    if (error) {
      return Status(Code::kUnavailable, "[http] cannot listen on " + options_.host + ":" +
                                            std::to_string(options_.port) + ": " + error.message());
    }
    rlimit files{};  // a connection is a file
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
      files.rlim_cur = files.rlim_max;
      setrlimit(RLIMIT_NOFILE, &files);
    }
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 &&
        files.rlim_cur < static_cast<rlim_t>(options_.max_connections) + 64) {
      options_.max_connections = std::max<int64_t>(16, int64_t(files.rlim_cur) - 64);
      notice("[http] at most " + std::to_string(options_.max_connections) + " connections: this process may open " +
             std::to_string(files.rlim_cur) + " files (ulimit -n)");
    }
    return Status();
  }

  int port() const override { return acceptor_.local_endpoint().port(); }

  void run(std::function<void(int)> on_signal) override {
    asio::signal_set signals(io_, SIGINT, SIGTERM);
    asio::co_spawn(io_, accept(), asio::detached);
    asio::co_spawn(
        io_,
        [&]() -> asio::awaitable<void> {
          for (int n = 1;; ++n) {
            const auto [error, signal] = co_await signals.async_wait(kTuple);
            if (error) co_return;
            on_signal(n);
          }
        },
        asio::detached);
    auto keep = asio::make_work_guard(io_);
    io_.run();
    join_workers();  // what they are at ends now: nothing of a request runs after this
  }

  void stop_accepting() override {
    asio::post(io_, [this] {
      error_code ignored;
      acceptor_.close(ignored);  // NOLINT
    });
  }
  void stop() override {
    asio::post(io_, [this] {
      const auto open = connections_;  // closing changes it
      for (const auto& connection : open) connection->close();
      io_.stop();
    });
  }
  void after(double seconds, std::function<void()> work) override {
    asio::post(io_, [this, seconds, work = std::move(work)]() mutable {
      auto timer = std::make_shared<asio::steady_timer>(io_, duration(seconds));
      timer->async_wait([timer, work = std::move(work)](error_code error) {
        if (!error) work();
      });
    });
  }
  HttpFigures figures() const override {
    return {.connections = counters_.connections,
            .accepted = counters_.accepted,
            .refused_connections = counters_.refused,
            .bad_requests = counters_.bad,
            .gone = counters_.gone,
            .slow_readers = counters_.slow};
  }

  const HttpOptions& options() const { return options_; }
  Counters& counters() { return counters_; }
  asio::io_context& io() { return io_; }
  // An answer of the web side's own. The connection is closed after it.
  std::string refused(HttpReply reply) {
    if (on_refusal_) on_refusal_(reply);
    return whole(reply, {});
  }
  void handle(std::shared_ptr<ExchangeImpl> exchange) {
    const size_t size = exchange->request().body.size();
    asio::thread_pool& lane = size == 0 ? bodiless_ : size <= kLongBody ? workers_ : long_bodies_;
    asio::post(lane, [this, exchange = std::move(exchange)] {
      if (!exchange->gone()) handler_(exchange);
    });
  }

 private:
  void join_workers() {
    for (asio::thread_pool* lane : {&bodiless_, &workers_, &long_bodies_}) lane->join();
  }
  asio::awaitable<void> accept() {
    for (;;) {
      auto [error, socket] = co_await acceptor_.async_accept(kTuple);
      if (error == asio::error::operation_aborted || !acceptor_.is_open()) co_return;
      if (error) {  // out of files, or the client left already: not our end
        asio::steady_timer pause(io_, std::chrono::milliseconds(50));
        co_await pause.async_wait(kTuple);
        continue;
      }
      ++counters_.accepted;
      if (std::ssize(connections_) >= options_.max_connections) {
        ++counters_.refused;
        const std::string busy = refused(refusal(503, "too many connections are open (--max-connections)"));
        error_code ignored;
        socket.non_blocking(true, ignored);              // NOLINT
        socket.write_some(asio::buffer(busy), ignored);  // NOLINT
        continue;
      }
      error_code ignored;
      socket.set_option(tcp::no_delay(true), ignored);  // NOLINT: tokens are to arrive one by one
      auto connection = std::make_shared<Connection>(*this, std::move(socket));
      connections_.insert(connection);
      ++counters_.connections;
      asio::co_spawn(io_, connection->serve(), [this, connection](const std::exception_ptr&) {
        connections_.erase(connection);
        --counters_.connections;
      });
    }
  }

  HttpOptions options_;
  Handler handler_;
  RefusalHook on_refusal_;
  asio::io_context io_;
  tcp::acceptor acceptor_;
  asio::thread_pool bodiless_{1}, workers_{kWorkers}, long_bodies_{1};
  std::unordered_set<std::shared_ptr<Connection>> connections_;  // the I/O thread's
  Counters counters_;
};

asio::awaitable<bool> Connection::send(std::string text) {
  stream_.expires_after(duration(server_.options().write_seconds));
  const auto [error, n] = co_await asio::async_write(stream_, asio::buffer(text), kTuple);
  stream_.expires_never();
  if (error == beast::error::timeout) ++server_.counters().slow;
  co_return !error;
}

// Waits for the first byte of a request. False: there is none. Blank lines before it are nothing (RFC 9112, 2.2).
asio::awaitable<bool> Connection::skip_blank_lines() {
  bool waits = buffer_.size() == 0;  // no time limit but idleness before the first byte
  for (;;) {
    while (buffer_.size() > 0) {
      const char first = *static_cast<const char*>(buffer_.data().data());
      if (first != '\r' && first != '\n') co_return true;
      buffer_.consume(1);
    }
    stream_.expires_after(duration(waits ? server_.options().idle_seconds : server_.options().header_seconds));
    waits = false;
    const auto [error, n] = co_await stream_.async_read_some(buffer_.prepare(4096), kTuple);
    if (error) co_return false;
    buffer_.commit(n);
  }
}

asio::awaitable<Connection::Received> Connection::receive() {
  const HttpOptions& options = server_.options();
  http::request_parser<http::string_body> parser;
  parser.header_limit(uint32_t(options.max_header_bytes));
  parser.body_limit(uint64_t(options.max_body_bytes));
  Received out;
  if (!co_await skip_blank_lines()) co_return out;
  stream_.expires_after(duration(options.header_seconds));
  {
    const auto [error, n] = co_await http::async_read_header(stream_, buffer_, parser, kTuple);
    if (error) {
      if (error == beast::error::timeout) ++server_.counters().bad;
      out.refusal = refusal_of(error, options, "this is not HTTP/1.1");
      co_return out;
    }
  }
  out.refusal = check_head(parser.get());
  if (out.refusal) co_return out;
  if (beast::iequals(parser.get()[http::field::expect], "100-continue") &&
      !co_await send("HTTP/1.1 100 Continue\r\n\r\n"))
    co_return out;
  stream_.expires_after(duration(options.body_seconds));
  {
    const auto [error, n] = co_await http::async_read(stream_, buffer_, parser, kTuple);
    if (error) {
      out.refusal = error == beast::error::timeout
                        ? refusal(408, "the body took longer than the time allowed")
                        : refusal_of(error, options, "the body is not encoded as its header says");
      co_return out;
    }
  }
  stream_.expires_never();
  auto message = parser.release();
  auto target = read_target(message.target());
  if (!target) {
    out.refusal = refusal(400, "the request line names no path of this server");
    co_return out;
  }
  HttpRequest request;
  request.method = std::string(message.method_string());
  request.path = std::move(target->path);
  request.query = std::move(target->query);
  request.host = target->authority.empty() ? std::string(message[http::field::host]) : target->authority;
  for (const auto& field : message) request.headers.emplace_back(lower(field.name_string()), field.value());
  request.body = std::move(message.body());
  out.manner = {.version = int(message.version()),
                // Without chunks the end of a connection is what ends a stream.
                .keep_alive = message.keep_alive() && message.version() >= 11,
                .head_only = message.method() == http::verb::head};
  out.request = std::move(request);
  co_return out;
}

// Returns when the client left. One that only closed its sending end (it sent FIN, as one that left does) still
// reads: the two differ in how they take a probe. Bytes of a next request are left where they are.
asio::awaitable<void> Connection::until_gone(const ExchangeImpl& exchange) {
  for (;;) {
    if (!half_closed_) {
      const auto [error] = co_await stream_.socket().async_wait(tcp::socket::wait_read, kTuple);
      if (error) co_return;
    }
    pollfd look{.fd = stream_.socket().native_handle(), .events = POLLRDHUP, .revents = 0};
    if (poll(&look, 1, 0) < 0 || (look.revents & (POLLERR | POLLHUP)) != 0) co_return;
    if ((look.revents & POLLRDHUP) != 0 && !half_closed_) {
      half_closed_ = true;
      const std::string probe = exchange.probe();
      if (probe.empty()) co_return;  // nothing would tell: most likely it left
      // At once and whole or not at all: nothing else is being sent now.
      if (::send(look.fd, probe.data(), probe.size(), MSG_DONTWAIT | MSG_NOSIGNAL) !=
          static_cast<ssize_t>(probe.size()))
        co_return;
    }
    // The socket stays readable from now on, and only a look now and then tells.
    asio::steady_timer pause(server_.io(), kPeekAgain);
    const auto [stopped] = co_await pause.async_wait(kTuple);
    if (stopped) co_return;
  }
}

// Sends what the answer gives. False: the connection is of no more use.
asio::awaitable<bool> Connection::answer(std::shared_ptr<ExchangeImpl> exchange) {
  exchange->set_cut_off([this] { close(); });  // as long as this runs, the connection lives
  for (;;) {
    if (exchange->overflowed()) co_return false;
    if (exchange->has_output()) {
      if (!co_await send(exchange->take_output())) co_return false;
      continue;
    }
    if (exchange->complete()) co_return exchange->keep_alive();
    const auto first = co_await (exchange->output() || until_gone(*exchange));
    if (first.index() == 1) co_return false;
  }
}

asio::awaitable<void> Connection::refuse(HttpReply refusal) {
  ++server_.counters().bad;
  co_await send(server_.refused(std::move(refusal)));
  // The rest of what the client sends is read and dropped for a moment: else it might see a reset instead.
  error_code ignored;
  stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);  // NOLINT
  stream_.expires_after(std::chrono::seconds(1));
  std::array<char, 4096> waste;
  for (int64_t left = 1 << 20; left > 0;) {
    const auto [error, n] = co_await stream_.async_read_some(asio::buffer(waste), kTuple);
    if (error) break;
    left -= int64_t(n);
  }
}

asio::awaitable<void> Connection::serve() {
  const auto self = shared_from_this();
  for (;;) {
    Received received = co_await receive();
    if (received.refusal) co_await refuse(*std::move(received.refusal));
    if (!received.request) break;
    auto exchange = std::make_shared<ExchangeImpl>(server_.io(), std::move(*received.request),
                                                   server_.options().send_buffer_bytes, received.manner);
    server_.handle(exchange);
    const bool again = co_await answer(exchange);
    exchange->set_cut_off([] {});
    if (!exchange->complete()) {
      ++server_.counters().gone;
      if (exchange->overflowed()) ++server_.counters().slow;
      exchange->client_is_gone();
    }
    if (!again) break;
  }
  close();
}

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::bind(const HttpOptions& options, Handler handler,
                                                     RefusalHook on_refusal) {
  auto server = std::make_unique<ServerImpl>(options, std::move(handler), std::move(on_refusal));
  if (Status status = server->bind(); !status.ok()) return status;
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace pagedkv::server
