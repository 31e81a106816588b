// HTTP/1.1 on one I/O thread: many connections, few bytes each, none of them waiting for another.
//
// A request is handed out as an Exchange. It is answered by any thread, at once or in pieces, now or minutes later;
// nothing here blocks on a slow or silent client. Beast does the parsing; it is included by http.cc alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pagedkv/status.h"

namespace pagedkv::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                      // 0: any free one; see HttpServer::port()
  int64_t max_connections = 4096;       // more are answered with 503 and closed
  int64_t max_header_bytes = 16 << 10;  // of one request
  int64_t max_body_bytes = 8 << 20;     // of one request; longer ones are refused before they are read
  int64_t send_buffer_bytes = 1 << 20;  // a client that lets more pile up is cut off
  double header_seconds = 10;           // for a whole header to arrive
  double body_seconds = 60;             // for a whole body to arrive
  double write_seconds = 30;            // for the client to take what is being sent
  double idle_seconds = 75;             // between two requests of a connection
};

struct HttpRequest {
  std::string method;
  std::string path;                                        // percent-decoded, without the query
  std::vector<std::pair<std::string, std::string>> query;  // name, value
  std::string host;  // "host:port" by which the client calls the server; empty: HTTP/1.0 without one
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;          // names in lower case
  std::string_view header(std::string_view lower_case_name) const {  // "" when there is none
    for (const auto& [name, value] : headers)
      if (name == lower_case_name) return value;
    return {};
  }
};

struct HttpReply {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string reason = {};  // of an error, for the log; not sent
};

// One request and its answer. All members: any thread.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual const HttpRequest& request() const = 0;
  // The request's body, once: a stream may last for minutes, and need not hold it.
  virtual std::string take_body() = 0;
  // The whole answer.
  virtual void reply(HttpReply reply) = 0;
  // The answer in pieces: begin, send any number of times, finish. The body of `head` goes out first.
  virtual void begin(HttpReply head) = 0;
  virtual void send(std::string piece) = 0;
  virtual void finish() = 0;
  virtual void abandon() = 0;  // the same, where something went wrong: the connection ends with it
  // Runs on the I/O thread, in the order of the calls. For work that is short and not the caller's.
  virtual void defer(std::function<void()> work) = 0;
  // Called once, on the I/O thread, when the client went away or was cut off before the answer was complete. Set it
  // before the answer begins; it is called at once when that has happened already.
  virtual void on_gone(std::function<void()> gone) = 0;
  // The same, to be asked now and then by whoever works for long.
  virtual bool gone() const = 0;
};

struct HttpFigures {
  int64_t connections = 0;          // open now
  int64_t accepted = 0;             // since the start
  int64_t refused_connections = 0;  // past max_connections
  int64_t bad_requests = 0;         // not HTTP, or past a limit
  int64_t gone = 0;                 // clients that left before their answer was complete
  int64_t slow_readers = 0;         // of them cut off: send buffer full or write timeout
};

class HttpServer {
 public:
  using Handler = std::function<void(std::shared_ptr<Exchange>)>;
  // Sees what the web side answers by itself, before it is sent. Called on the I/O thread.
  using RefusalHook = std::function<void(HttpReply& refusal)>;
  // Binds. `handler` is called on worker threads, so that it may parse and tokenize. What comes without a body has
  // a thread to itself, and so have long bodies: neither waits behind them. Errors: kInvalidArgument (host),
  // kUnavailable (the port is taken, no permission).
  static Result<std::unique_ptr<HttpServer>> bind(const HttpOptions& options, Handler handler,
                                                  RefusalHook on_refusal);
  virtual ~HttpServer() = default;
  virtual int port() const = 0;
  // Serves until stop(). Calls `on_signal(n)` on the I/O thread at the n-th SIGINT or SIGTERM.
  virtual void run(std::function<void(int)> on_signal) = 0;
  // Any thread. No new connections from now on; those that are open go on.
  virtual void stop_accepting() = 0;
  // Any thread. Closes all connections and lets run() return.
  virtual void stop() = 0;
  // Any thread. Calls `work` on the I/O thread after so many seconds.
  virtual void after(double seconds, std::function<void()> work) = 0;
  virtual HttpFigures figures() const = 0;  // any thread
};

}  // namespace pagedkv::server
