// The one owner of stdout and stderr: nothing else in the program writes to them.
//
// stdout has what was asked for: a write that fails is an error, told by finish(). stderr has everything else: a
// line that cannot be written is lost and counted, and nothing else happens. Neither throws, and neither raises
// SIGPIPE.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <ostream>
#include <string_view>
#include <utility>

namespace pagedkv::cli {

// Before anything is opened or written: SIGPIPE and SIGXFSZ become errors of the write, and of stdin, stdout and
// stderr those that are closed get a place of their own, so that no file or connection takes their number.
void own_streams();

// Any thread. False once stdout cannot be written; then nothing more is.
bool out(std::string_view text);
template <class... Args>
bool print_out(fmt::format_string<Args...> format, Args&&... args) {
  return out(fmt::format(format, std::forward<Args>(args)...));
}
// The exit code of a command that is done but for that: 0, or 1 with `[command] stdout cannot be written: why` on
// stderr, or 141 without a word where the reader of a pipe has left, as if SIGPIPE had ended it.
int finish(const char* command);

// Any thread; the text of one call stays together.
void err(std::string_view text);
template <class... Args>
void print_err(fmt::format_string<Args...> format, Args&&... args) {
  err(fmt::format(format, std::forward<Args>(args)...));
}
// From here on no write to stderr waits for its reader: for a server, whose log must not stop it.
void never_wait_for_err();
// Lines that stderr did not take. Told on stderr, too, as soon as it takes a line again.
int64_t lost_err_lines();

// The same two for code that prints into a stream.
std::ostream& out_stream();
std::ostream& err_stream();

}  // namespace pagedkv::cli
