// Ctrl-C as a flag.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>

namespace pagedkv::cli {

// Set by SIGINT while an Interrupt lives.
inline volatile std::sig_atomic_t interrupted = 0;

// Readable after a SIGINT: for who waits with poll(), since a read() that is about to begin would not see it.
inline int interrupt_event() {
  static const int event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  return event;
}

// While it lives Ctrl-C sets the flag and the event, and a read that waits ends with EINTR.
class Interrupt {
 public:
  enum class Second { kKills, kIsTheSame };  // what another Ctrl-C does
  explicit Interrupt(Second second) {
    interrupt_event();  // made here: a handler must not
    struct sigaction action {};
    action.sa_handler = [](int) {
      const int before = errno;
      interrupted = 1;
      const uint64_t one = 1;
      [[maybe_unused]] const ssize_t told = write(interrupt_event(), &one, sizeof one);
      errno = before;
    };
    action.sa_flags = second == Second::kKills ? int(SA_RESETHAND) : 0;
    sigaction(SIGINT, &action, &before_);
  }
  ~Interrupt() { sigaction(SIGINT, &before_, nullptr); }
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

 private:
  struct sigaction before_ {};
};

inline constexpr int kExitCancelled = 130;  // 128 + SIGINT, as shells have it

}  // namespace pagedkv::cli
