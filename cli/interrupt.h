// Ctrl-C as a flag.
#pragma once

#include <csignal>

namespace pagedkv::cli {

// Set by SIGINT while an Interrupt lives.
inline volatile std::sig_atomic_t interrupted = 0;

// While it lives Ctrl-C sets the flag, and a read that waits ends with EINTR.
class Interrupt {
 public:
  enum class Second { kKills, kIsTheSame };  // what another Ctrl-C does
  explicit Interrupt(Second second) {
    struct sigaction action {};
    action.sa_handler = [](int) { interrupted = 1; };
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
