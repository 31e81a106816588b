#include "cli/line_reader.h"

#include <histedit.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <cstdio>
#include <cstdlib>
#include <cwchar>

#include "cli/console.h"
#include "cli/interrupt.h"

namespace pagedkv::cli {
namespace {

constexpr int kHistoryLines = 1000;

// Whether a byte of stdin came before Ctrl-C, which leaves EINTR in errno. libedit's own waiting misses a Ctrl-C
// that comes while it draws.
bool wait_for_byte() {
  pollfd events[] = {{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0},
                     {.fd = interrupt_event(), .events = POLLIN, .revents = 0}};
  while (poll(events, 2, -1) < 0 || events[1].revents != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t emptied = ::read(interrupt_event(), &count, sizeof count);
    if (interrupted != 0) {
      interrupted = 0;
      errno = EINTR;
      return false;
    }
    // The event of a Ctrl-C that has already been obeyed.
  }
  return true;
}

// One character of stdin, for libedit: 1, 0 at the end, -1 with errno. Bytes that are no text are passed over.
int read_character(EditLine* /*edit*/, wchar_t* character) {
  std::mbstate_t state{};
  for (;;) {
    char byte = 0;
    if (!wait_for_byte()) return -1;
    const ssize_t n = ::read(STDIN_FILENO, &byte, 1);
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) return int(n);
    const size_t used = std::mbrtowc(character, &byte, 1, &state);
    if (used == size_t(-1)) state = {};
    if (used <= 1) return 1;
  }
}

}  // namespace

struct LineReader::Terminal {
  std::string prompt;
  EditLine* edit = nullptr;
  History* history = nullptr;
  HistEvent event = {};

  explicit Terminal(std::string shown) : prompt(std::move(shown)) {
    // libedit decodes what is typed by the locale; a process that has none gets UTF-8.
    if (std::setlocale(LC_CTYPE, "") == nullptr || MB_CUR_MAX == 1) std::setlocale(LC_CTYPE, "C.UTF-8");
    edit = el_init("pagedkv", stdin, stderr, stderr);  // stdout gets answers and nothing else
    history = history_init();
    if (edit == nullptr || history == nullptr) return;
    ::history(history, &event, H_SETSIZE, kHistoryLines);
    ::history(history, &event, H_SETUNIQUE, 1);
    el_set(edit, EL_CLIENTDATA, this);
    el_set(
        edit, EL_PROMPT, +[](EditLine* line) {
          void* self = nullptr;
          el_get(line, EL_CLIENTDATA, &self);
          return static_cast<Terminal*>(self)->prompt.data();
        });
    el_set(edit, EL_EDITOR, "emacs");
    el_set(edit, EL_GETCFN, read_character);
    el_set(edit, EL_HIST, ::history, history);
    el_set(edit, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    el_source(edit, nullptr);  // ~/.editrc
  }
  ~Terminal() {
    if (history != nullptr) history_end(history);
    if (edit != nullptr) el_end(edit);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;
};

LineReader::LineReader(const std::string& prompt) {
  if (!cli::is_terminal(stdin) || !cli::is_terminal(stderr)) return;
  terminal_ = std::make_unique<Terminal>(prompt);
  if (terminal_->edit == nullptr || terminal_->history == nullptr) terminal_.reset();  // plain lines then
}

LineReader::~LineReader() = default;

LineReader::End LineReader::read(std::string& line) {
  errno = 0;
  if (terminal_) {
    int n = 0;
    const char* typed = el_gets(terminal_->edit, &n);
    if (typed == nullptr || n <= 0) {
      if (errno != EINTR) return End::kNoMore;
      el_reset(terminal_->edit);
      return End::kCancelled;
    }
    line.assign(typed, size_t(n));
    if (line.ends_with('\n')) line.pop_back();
    if (line.find_first_not_of(" \t") != std::string::npos)
      ::history(terminal_->history, &terminal_->event, H_ENTER, line.c_str());
    return End::kLine;
  }
  char* text = nullptr;
  size_t room = 0;
  const ssize_t n = getline(&text, &room, stdin);
  const int error = errno;
  if (n >= 0) line.assign(text, size_t(n));
  std::free(text);
  if (n < 0 && error == EINTR) {
    std::clearerr(stdin);
    return End::kCancelled;
  }
  errno = error;
  if (n < 0) return std::ferror(stdin) ? End::kError : End::kNoMore;
  if (line.ends_with('\n')) line.pop_back();
  if (line.ends_with('\r')) line.pop_back();
  return End::kLine;
}

}  // namespace pagedkv::cli
