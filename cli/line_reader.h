// Lines of a person, or of a pipe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace pagedkv::cli {

// On a terminal: editing and history by libedit, kept for this process and not written anywhere. Otherwise plain
// lines of stdin. One thread.
class LineReader {
 public:
  enum class End : uint8_t {
    kLine,
    kCancelled,  // Ctrl-C: the line is thrown away
    kNoMore,     // Ctrl-D, or the end of stdin
    kError,      // errno says what
  };

  explicit LineReader(const std::string& prompt);  // the prompt is shown on a terminal only
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  bool is_terminal() const { return terminal_ != nullptr; }
  // The line without its newline. Requires, for kCancelled: an Interrupt.
  End read(std::string& line);

 private:
  struct Terminal;
  std::unique_ptr<Terminal> terminal_;  // null where stdin or stderr is no terminal
};

}  // namespace pagedkv::cli
