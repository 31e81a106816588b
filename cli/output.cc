#include "cli/output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstring>
#include <mutex>
#include <streambuf>

#include "cli/console.h"

namespace pagedkv::cli {
namespace {

constexpr int kExitPipe = 128 + SIGPIPE;

// Writes all of it, however long that takes; 0, or the errno of the write that failed.
int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {  // somebody else made it non-blocking
      pollfd wait{.fd = fd, .events = POLLOUT, .revents = 0};
      poll(&wait, 1, -1);
      continue;
    }
    if (n < 0) return errno;
    text.remove_prefix(size_t(n));
  }
  return 0;
}

class StandardOut {
 public:
  bool write(std::string_view text) {
    const std::lock_guard lock(mutex_);
    if (error_ == 0) error_ = write_all(STDOUT_FILENO, text);
    return error_ == 0;
  }
  int error() {
    const std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  std::mutex mutex_;
  int error_ = 0;
};

class StandardError {
 public:
  void write(std::string_view text) {
    const std::lock_guard lock(mutex_);
    if (lost_ == told_) {
      if (!put(text)) lose(text);
      return;
    }
    // In one write with what was lost before: short notes alone would fill what room there is.
    const int64_t lost = lost_;
    const std::string whole = fmt::format("{}pagedkv: [log] {} lines were lost: {}\n{}", torn_ ? "\n" : "",
                                          lost - told_, std::strerror(why_), text);
    torn_ = false;
    if (!put(whole)) return lose(text);
    told_ = lost;
  }

  void never_wait() {
    const std::lock_guard lock(mutex_);
    struct stat status {};
    if (fstat(STDERR_FILENO, &status) != 0 || S_ISREG(status.st_mode)) return;
    if ((fcntl(STDERR_FILENO, F_GETFL) & O_ACCMODE) == O_RDONLY)
      return;  // it was closed: every write fails at once
    if (S_ISSOCK(status.st_mode)) {
      mode_ = Mode::kSocket;
      return;
    }
    // An open file description of our own: O_NONBLOCK on the one we were given would be everybody's who has it.
    const int own = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (own >= 0) fd_ = own;
    mode_ = own >= 0 ? Mode::kNonBlocking : Mode::kPoll;
  }

  int64_t lost() const { return lost_.load(); }

 private:
  enum class Mode : uint8_t { kWaits, kNonBlocking, kSocket, kPoll };

  void lose(std::string_view text) {
    lost_ += std::max<std::ptrdiff_t>(1, std::count(text.begin(), text.end(), '\n'));
  }

  // All of it, or false; a part of it may be out then.
  bool put(std::string_view text) {
    if (mode_ == Mode::kWaits) {
      why_ = write_all(STDERR_FILENO, text);
      return why_ == 0;
    }
    const size_t size = text.size();
    while (!text.empty()) {
      ssize_t n = -1;
      if (mode_ == Mode::kSocket) {
        n = send(STDERR_FILENO, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      } else if (mode_ == Mode::kNonBlocking) {
        n = ::write(fd_, text.data(), text.size());
      } else {
        // Room for one page is room for one write of PIPE_BUF, unless another process takes it first.
        pollfd room{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
        errno = EAGAIN;
        if (poll(&room, 1, 0) == 1)
          n = ::write(STDERR_FILENO, text.data(), std::min<size_t>(text.size(), PIPE_BUF));
      }
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        why_ = errno;
        torn_ |= text.size() < size;
        return false;
      }
      text.remove_prefix(size_t(n));
    }
    return true;
  }

  std::mutex mutex_;
  Mode mode_ = Mode::kWaits;
  int fd_ = STDERR_FILENO;
  std::atomic<int64_t> lost_{0};
  int64_t told_ = 0;  // of lost_
  int why_ = 0;
  bool torn_ = false;  // a line is out in part
};

// Never destroyed: threads that outlive main may still log.
StandardOut& standard_out() {
  static auto* one = new StandardOut;
  return *one;
}
StandardError& standard_error() {
  static auto* one = new StandardError;
  return *one;
}

template <class Write>
class Buffer : public std::streambuf {
 public:
  explicit Buffer(Write write) : write_(write) {}

 private:
  std::streamsize xsputn(const char* text, std::streamsize n) override {
    line_.append(text, size_t(n));
    if (line_.ends_with('\n')) sync();  // rows of a table show as they are made
    return n;
  }
  int overflow(int c) override {
    if (c == traits_type::eof()) return 0;
    const char one = char(c);
    xsputn(&one, 1);
    return 0;
  }
  int sync() override {
    write_(std::string_view(line_));
    line_.clear();
    return 0;
  }
  Write write_;
  std::string line_;
};

}  // namespace

void own_streams() {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a file that would pass the limit of `ulimit -f` is an error of its write, too
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) != -1 || errno != EBADF) continue;
    // The lowest free number is this one. Open for the wrong direction: writes fail, as they do on a closed one.
    static_cast<void>(open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY));
  }
}

bool out(std::string_view text) { return standard_out().write(text); }

int finish(const char* command) {
  const int error = standard_out().error();
  if (error == 0) return 0;
  if (error == EPIPE) return kExitPipe;
  return fail(
      Status(Code::kUnavailable, fmt::format("[{}] stdout cannot be written: {}", command, std::strerror(error))));
}

void err(std::string_view text) { standard_error().write(text); }
void never_wait_for_err() { standard_error().never_wait(); }
int64_t lost_err_lines() { return standard_error().lost(); }

std::ostream& out_stream() {
  static auto* buffer = new Buffer([](std::string_view text) { out(text); });
  static auto* stream = new std::ostream(buffer);
  return *stream;
}
std::ostream& err_stream() {
  static auto* buffer = new Buffer([](std::string_view text) { err(text); });
  static auto* stream = new std::ostream(buffer);
  return *stream;
}

}  // namespace pagedkv::cli
